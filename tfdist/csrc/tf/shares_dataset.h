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

struct RowRange {
  int64_t start, stop;
};

// Returns the rows of one replica in a batch with `rows` rows. If they cannot be divided evenly,
// each of the first replicas gets one more row.
RowRange ShareOfRows(int64_t rows, int64_t replica, int64_t replicas);

// Returns an error if a component of a batch is a scalar, so that it has no rows.
absl::Status CheckRows(const tensorflow::Tensor& component);

// Returns rows of a component, in the component's memory if TensorFlow's kernels can use it there.
tensorflow::Tensor TakeAlignedRows(const tensorflow::Tensor& component, int64_t start,
                                   int64_t stop);

// Reads batches from an input dataset. At the request of a Replay, it returns the last batch again,
// or forms batches of another size from the rows of the input's batches.
class BatchSource {
 public:
  using Batch = std::vector<tensorflow::Tensor>;

  explicit BatchSource(std::shared_ptr<Replay> replay) : replay_(std::move(replay)) {}

  // Finds the next batch to return. If the last batch has been requested again, finds this batch
  // once more. Otherwise, usually takes the input's next batch. There is one exception: if the
  // number of rows per worker is fixed and the number of workers has changed, the next batch
  // consists of as many of the input's next rows as `workers` workers need. If the input has no
  // more rows, sets `*ended`.
  absl::Status Next(tensorflow::data::IteratorContext* context,
                    tensorflow::data::IteratorBase* input, int64_t workers, bool* ended);
  // Returns the batch that the last call of `Next` has found.
  const Batch& batch() const { return batch_; }
  // Returns whether the last batch has been requested again, so that `Next` will find the same
  // batch once more.
  bool is_asked_again() const { return replay_ && replay_->is_requested(); }
  // Frees the memory of the last batch, unless a Replay may request this batch again.
  void Release();

  absl::Status Save(const std::string& prefix, tensorflow::data::IteratorStateWriter* writer);
  absl::Status Restore(tensorflow::data::IteratorContext* context, const std::string& prefix,
                       tensorflow::data::IteratorStateReader* reader);

 private:
  // A position between two rows of the batches in `read_`.
  struct Place {
    int64_t batches = 0;  // the number of whole batches before this position
    // The offset of this position in the batch that follows, in rows.
    int64_t offset = 0;
    bool operator==(const Place& other) const {
      return batches == other.batches && offset == other.offset;
    }
  };

  // Reads batches from the input until `read_` contains the batch with the index `number`. If the
  // input ends before that, sets `*ended`.
  absl::Status ReadTo(tensorflow::data::IteratorContext* context,
                      tensorflow::data::IteratorBase* input, int64_t number, bool* ended);
  // Moves the position `*end` forward by `rows` rows, or to the end of the data if fewer rows are
  // left.
  absl::Status Find(tensorflow::data::IteratorContext* context,
                    tensorflow::data::IteratorBase* input, int64_t rows, Place* end);
  // Sets `batch_` to the rows between the positions `begin_` and `end_`.
  absl::Status Take();
  // Returns an error unless the rows of the batch with the index `number` in `read_` can be joined
  // with the rows of the batches before it.
  absl::Status Check(int64_t number) const;
  RowCounts CountsAt(const Place& place) const;
  void Publish();

  const std::shared_ptr<Replay> replay_;
  std::deque<Batch> read_;  // batches of the input that are still needed
  // The positions in `read_` at which the last batch begins and ends. `begin_.batches` is 0,
  // because earlier batches are removed from `read_`.
  Place begin_, end_;
  Batch batch_;
  // The numbers of batches and rows that have been read from the input. The input yields its first
  // batch twice (see RowCounts), and the first copy is not counted.
  int64_t batches_read_ = 0, rows_read_ = 0;
  bool begun_ = false;  // whether the first copy of the first batch has been read
};

}  // namespace tfdist::tf
