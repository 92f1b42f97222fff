// Requests from Python about the batches of a dataset's iterator: to return the last batch again,
// or to keep each worker's number of rows per batch when the number of workers changes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

namespace tfdist {

// The position of an iterator in its dataset. The iterator reads the first batch twice, and the
// first of these two reads is not counted.
struct RowCounts {
  int64_t batches = 0;          // number of the dataset's own batches read so far
  int64_t rows = 0;             // number of rows in these batches
  int64_t pending = 0;          // number of rows read but not yet returned
  int64_t pending_batches = 0;  // number of the dataset's own batches with pending rows
};

// Holds the requests for an iterator, and the position of the iterator.
class Replay {
 public:
  // Makes the iterator return its last batch once more.
  void Request() { wanted_ = true; }
  bool is_requested() const { return wanted_; }
  // Returns whether a repetition has been requested, and clears the request. The iterator calls
  // this function before each batch.
  bool Take() { return wanted_.exchange(false); }
  void Count() { ++given_; }
  // Returns the number of batches that have been returned so far, not counting repetitions.
  int64_t given() const { return given_; }

  // Fixes the number of rows per batch for each worker. This number becomes the worker's share when
  // `workers` workers divide one of the dataset's own batches, which has `batch` rows. If `batch`
  // is 0, the first batch that is read determines it. If the number of workers changes later, the
  // size of the batches changes instead of this share.
  void KeepRows(int64_t workers, int64_t batch);
  bool keeps_rows() const { return workers_ > 0; }
  void SetBatch(int64_t rows);
  // Returns the number of rows of a batch for `workers` workers, or 0 if the dataset's own batches
  // are used unchanged.
  int64_t RowsFor(int64_t workers) const;
  // Returns the number of rows of the dataset's own batches, or 0 if it is not yet known.
  int64_t batch() const { return batch_; }
  // Makes the next batch have `rows` rows.
  void Want(int64_t rows) { rows_wanted_ = rows; }
  int64_t TakeWanted() { return rows_wanted_.exchange(0); }
  // Selects whether each worker receives the whole batch, for inspection, instead of its part of
  // the batch.
  void GiveWhole(bool whole) { gives_whole_ = whole; }
  bool gives_whole() const { return gives_whole_; }
  void Publish(const RowCounts& now, const RowCounts& before_last);
  // Returns the position of the iterator that was read last: its current position, or its position
  // before it returned its last batch.
  RowCounts Counts(bool before_last) const;

 private:
  std::atomic<bool> wanted_{false}, gives_whole_{false};
  std::atomic<int64_t> given_{0}, workers_{0}, batch_{0}, rows_wanted_{0};
  mutable std::mutex mutex_;
  RowCounts now_, before_last_;
};

// Registers a replay, and returns the number that identifies it in this process. Numbers begin at 1
// and are never reused.
int64_t RegisterReplay();

// Returns the replay with this number. Throws Error(kClosed) if there is none.
std::shared_ptr<Replay> FindReplay(int64_t number);

void RemoveReplay(int64_t number);

}  // namespace tfdist
