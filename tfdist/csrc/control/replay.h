// What Python asks of the batches of a dataset: the last one once more, or others of the same rows.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

namespace tfdist {

// How much of a dataset one of its iterators has read, without the first batch, which is read
// twice.
struct RowCounts {
  int64_t batches = 0;          // of the dataset's own
  int64_t rows = 0;             // of these
  int64_t pending = 0;          // of these, those that are still to be given
  int64_t pending_batches = 0;  // in how many of the dataset's own they are
};

class Replay {
 public:
  // Has the next batch be the last one again.
  void Request() { wanted_ = true; }
  bool is_requested() const { return wanted_; }
  // Before each batch: whether it has been asked for, which it is then no longer.
  bool Take() { return wanted_.exchange(false); }
  void Count() { ++given_; }
  // The number of batches so far, without repetitions.
  int64_t given() const { return given_; }

  // From now on a worker's part of a batch has as many rows as when `workers` share one of the
  // dataset's own; the first one that is read tells how many rows those have, if `batch` is 0.
  void KeepRows(int64_t workers, int64_t batch);
  bool keeps_rows() const { return workers_ > 0; }
  void SetBatch(int64_t rows);
  // The rows of a batch for so many workers; 0 if they are those of the dataset's own.
  int64_t RowsFor(int64_t workers) const;
  // The rows of the dataset's own batches; 0 if none is known yet.
  int64_t batch() const { return batch_; }
  // Has the next batch have so many rows.
  void Want(int64_t rows) { rows_wanted_ = rows; }
  int64_t TakeWanted() { return rows_wanted_.exchange(0); }
  // Whether a worker is given the whole batch, to look at, instead of its part.
  void GiveWhole(bool whole) { gives_whole_ = whole; }
  bool gives_whole() const { return gives_whole_; }
  void Publish(const RowCounts& now, const RowCounts& before_last);
  // Those of the iterator that was read last, or before its last batch was given.
  RowCounts Counts(bool before_last) const;

 private:
  std::atomic<bool> wanted_{false}, gives_whole_{false};
  std::atomic<int64_t> given_{0}, workers_{0}, batch_{0}, rows_wanted_{0};
  mutable std::mutex mutex_;
  RowCounts now_, before_last_;
};

// Returns its number in this process, from 1; a number is never used again.
int64_t RegisterReplay();

// Throws Error(kClosed) if there is none of this number any more.
std::shared_ptr<Replay> FindReplay(int64_t number);

void RemoveReplay(int64_t number);

}  // namespace tfdist
