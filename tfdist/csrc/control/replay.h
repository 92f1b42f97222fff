// Lets Python control the batches of a dataset's iterator. The iterator can return its last batch
// again. It can also keep the number of rows per worker constant when the number of workers
// changes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

namespace tfdist {

// The position of an iterator in its dataset. The dataset yields its first batch twice, because the
// workers compare the first copy before the epoch begins. This copy is not counted.
struct RowCounts {
  int64_t batches = 0;          // the number of the dataset's own batches read so far
  int64_t rows = 0;             // the number of rows in these batches
  int64_t pending = 0;          // the number of rows that have been read but not yet returned
  int64_t pending_batches = 0;  // the number of the dataset's own batches with such rows
};

// Holds Python's requests for an iterator, and publishes the iterator's position.
class Replay {
 public:
  // Requests that the iterator return its last batch once more.
  void Request() { wanted_ = true; }
  bool is_requested() const { return wanted_; }
  // Returns whether the last batch has been requested again, and clears this request. The iterator
  // calls this function before it returns a batch.
  bool Take() { return wanted_.exchange(false); }
  void Count() { ++given_; }
  // Returns the number of batches that the iterator has returned so far. A repeated batch counts
  // only once.
  int64_t given() const { return given_; }

  // Fixes the number of rows that each worker receives per batch. This number is the share of one
  // worker when `workers` workers divide one of the dataset's own batches. Such a batch has `batch`
  // rows; if `batch` is 0, the first batch that is read determines this number. If the number of
  // workers changes later, each worker still receives the same number of rows, and the batches
  // become larger or smaller.
  void KeepRows(int64_t workers, int64_t batch);
  bool keeps_rows() const { return workers_ > 0; }
  void SetBatch(int64_t rows);
  // Returns the number of rows in a batch for `workers` workers, or 0 if the iterator returns the
  // dataset's own batches unchanged.
  int64_t RowsFor(int64_t workers) const;
  // Returns the number of rows in one of the dataset's own batches, or 0 if this number is not yet
  // known.
  int64_t batch() const { return batch_; }
  // Requests that the next batch have `rows` rows.
  void Want(int64_t rows) { rows_wanted_ = rows; }
  int64_t TakeWanted() { return rows_wanted_.exchange(0); }
  // Selects whether each worker receives the whole batch instead of its part. The workers need
  // whole batches to compare them.
  void GiveWhole(bool whole) { gives_whole_ = whole; }
  bool gives_whole() const { return gives_whole_; }
  void Publish(const RowCounts& now, const RowCounts& before_last);
  // Returns the position of the iterator that was used last. If `before_last` is true, this is its
  // position before it returned its last batch; otherwise, it is the current position.
  RowCounts Counts(bool before_last) const;

 private:
  std::atomic<bool> wanted_{false}, gives_whole_{false};
  std::atomic<int64_t> given_{0}, workers_{0}, batch_{0}, rows_wanted_{0};
  mutable std::mutex mutex_;
  RowCounts now_, before_last_;
};

// Creates a replay, and returns the number that identifies it in this process. Numbers begin at 1
// and are never reused.
int64_t RegisterReplay();

// Returns the replay with this number. Throws Error(kClosed) if there is none.
std::shared_ptr<Replay> FindReplay(int64_t number);

void RemoveReplay(int64_t number);

}  // namespace tfdist
