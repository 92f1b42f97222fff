// The dataset that divides the rows of each batch among replicas.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "control/replay.h"
#include "tensorflow/core/framework/dataset.h"

namespace tfdist::tf {

// Reads batches from an input. On request, it returns the last batch again, or batches of another
// size.
class BatchSource {
 public:
  using Batch = std::vector<tensorflow::Tensor>;

  explicit BatchSource(std::shared_ptr<Replay> replay) : replay_(std::move(replay)) {}

  // Finds the next batch. If a repetition has been requested, it is the last batch. Otherwise it is
  // the next batch of the input. However, if each worker keeps its number of rows per batch and the
  // number of workers has changed, the batch consists of the next rows of the input's batches, as
  // many as `workers` workers need.
  absl::Status Next(tensorflow::data::IteratorContext* context,
                    tensorflow::data::IteratorBase* input, int64_t workers, bool* ended);
  // Returns the batch that `Next` has found.
  const Batch& batch() const { return batch_; }
  // Returns whether the next batch will be the last batch again.
  bool is_asked_again() const { return replay_ && replay_->is_requested(); }
  // Frees the memory of the last batch, unless this batch may be requested again.
  void Release();

  absl::Status Save(const std::string& prefix, tensorflow::data::IteratorStateWriter* writer);
  absl::Status Restore(tensorflow::data::IteratorContext* context, const std::string& prefix,
                       tensorflow::data::IteratorStateReader* reader);

 private:
  // A position between two rows of the batches in `read_`.
  struct Place {
    int64_t batches = 0;  // number of whole batches before this position
    int64_t offset = 0;   // number of rows of the following batch before this position
    bool operator==(const Place& other) const {
      return batches == other.batches && offset == other.offset;
    }
  };

  // Reads batches from the input until `read_` contains the batch with the index `number`.
  absl::Status ReadTo(tensorflow::data::IteratorContext* context,
                      tensorflow::data::IteratorBase* input, int64_t number, bool* ended);
  // Moves the position `*end` forward by `rows` rows, or to the end of the data.
  absl::Status Find(tensorflow::data::IteratorContext* context,
                    tensorflow::data::IteratorBase* input, int64_t rows, Place* end);
  // Sets `batch_` to the rows from `begin_` to `end_`.
  absl::Status Take();
  // Checks that the rows of a batch can be joined with the rows of the batches before it.
  absl::Status Check(int64_t number) const;
  RowCounts CountsAt(const Place& place) const;
  void Publish();

  const std::shared_ptr<Replay> replay_;
  std::deque<Batch> read_;  // batches of the input that are still needed
  Place begin_, end_;       // where the last batch is in `read_`; `begin_.batches` is 0
  Batch batch_;
  // The numbers of batches and rows that have been read. The first batch is read twice, and the
  // first of these two reads is not counted.
  int64_t batches_read_ = 0, rows_read_ = 0;
  bool begun_ = false;  // whether the first batch has been read
};

}  // namespace tfdist::tf
