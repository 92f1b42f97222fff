// Requests from Python about a dataset's batches: to repeat the last batch, or to keep the number
// of rows that a worker has of each batch.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

namespace tfdist {

// The position of an iterator in its dataset. The first batch is read twice, and its first reading
// is not counted.
struct RowCounts {
  int64_t batches = 0;          // the dataset's own batches read so far
  int64_t rows = 0;             // their rows
  int64_t pending = 0;          // the rows that have not been returned yet
  int64_t pending_batches = 0;  // the dataset's own batches that contain the pending rows
};

class Replay {
 public:
  // Makes the iterator return the previous batch once more.
  void Request() { wanted_ = true; }
  bool is_requested() const { return wanted_; }
  // Called before each batch: returns whether a repetition was requested, and clears the request.
  bool Take() { return wanted_.exchange(false); }
  void Count() { ++given_; }
  // The number of batches returned so far, not counting repetitions.
  int64_t given() const { return given_; }

  // Fixes a worker's rows per batch to its share when `workers` workers divide one of the dataset's
  // own batches of `batch` rows. If `batch` is 0, the first batch read determines it.
  void KeepRows(int64_t workers, int64_t batch);
  bool keeps_rows() const { return workers_ > 0; }
  void SetBatch(int64_t rows);
  // The rows of a batch for `workers` workers; 0 if the dataset's own batches are used.
  int64_t RowsFor(int64_t workers) const;
  // The rows of the dataset's own batches; 0 if not yet known.
  int64_t batch() const { return batch_; }
  // Makes the next batch have `rows` rows.
  void Want(int64_t rows) { rows_wanted_ = rows; }
  int64_t TakeWanted() { return rows_wanted_.exchange(0); }
  // Selects whether a worker receives the whole batch, for inspection, instead of its part.
  void GiveWhole(bool whole) { gives_whole_ = whole; }
  bool gives_whole() const { return gives_whole_; }
  void Publish(const RowCounts& now, const RowCounts& before_last);
  // The position of the iterator read last, now or before its last batch was returned.
  RowCounts Counts(bool before_last) const;

 private:
  std::atomic<bool> wanted_{false}, gives_whole_{false};
  std::atomic<int64_t> given_{0}, workers_{0}, batch_{0}, rows_wanted_{0};
  mutable std::mutex mutex_;
  RowCounts now_, before_last_;
};

// Registers a replay and returns its number in this process, from 1, never reused.
int64_t RegisterReplay();

// Throws Error(kClosed) if no replay has this number.
std::shared_ptr<Replay> FindReplay(int64_t number);

void RemoveReplay(int64_t number);

}  // namespace tfdist
