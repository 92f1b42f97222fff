// The dataset of a rank's share of the rows of each batch.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "control/replay.h"
#include "tensorflow/core/framework/dataset.h"

namespace tfdist::tf {

class BatchSource {
 public:
  using Batch = std::vector<tensorflow::Tensor>;

  explicit BatchSource(std::shared_ptr<Replay> replay) : replay_(std::move(replay)) {}

  // Finds the last batch again, the input's next batch, or the next rows of the input's batches. If
  // each worker keeps its rows per batch and the number of workers has changed, the batch has the
  // rows for `workers` workers.
  absl::Status Next(tensorflow::data::IteratorContext* context,
                    tensorflow::data::IteratorBase* input, int64_t workers, bool* ended);
  // The batch found by `Next`.
  const Batch& batch() const { return batch_; }
  // Whether the next batch repeats the last one.
  bool is_asked_again() const { return replay_ && replay_->is_requested(); }
  // Frees the memory of a batch that is no longer needed, unless the batch may be requested again.
  void Release();

  absl::Status Save(const std::string& prefix, tensorflow::data::IteratorStateWriter* writer);
  absl::Status Restore(tensorflow::data::IteratorContext* context, const std::string& prefix,
                       tensorflow::data::IteratorStateReader* reader);

 private:
  // A position between two rows of `read_`.
  struct Place {
    int64_t batches = 0;  // batches before this position
    int64_t offset = 0;   // rows of the next batch before this position
    bool operator==(const Place& other) const {
      return batches == other.batches && offset == other.offset;
    }
  };

  // Reads until the batch of this number is available.
  absl::Status ReadTo(tensorflow::data::IteratorContext* context,
                      tensorflow::data::IteratorBase* input, int64_t number, bool* ended);
  // Advances a position by a number of rows, or to the end of the data.
  absl::Status Find(tensorflow::data::IteratorContext* context,
                    tensorflow::data::IteratorBase* input, int64_t rows, Place* end);
  // Sets `batch_` to the rows from `begin_` to `end_`.
  absl::Status Take();
  // Checks that rows of this batch can follow the earlier batches' rows.
  absl::Status Check(int64_t number) const;
  RowCounts CountsAt(const Place& place) const;
  void Publish();

  const std::shared_ptr<Replay> replay_;
  std::deque<Batch> read_;  // the input's batches that are still needed
  Place begin_, end_;       // of the last batch; `begin_` is in the first batch of `read_`
  Batch batch_;
  int64_t batches_read_ = 0, rows_read_ = 0;  // without the first reading of the first batch
  bool begun_ = false;                        // whether the first batch has been read
};

}  // namespace tfdist::tf
