#include "tf/shares_dataset.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "control/replay.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/tensor_util.h"
#include "tf/collective_op.h"
#include "tf/sparse_op.h"

namespace tfdist::tf {
namespace {

using tensorflow::Tensor;
using tensorflow::data::IteratorBase;
using tensorflow::data::IteratorContext;
using tensorflow::data::IteratorStateReader;
using tensorflow::data::IteratorStateWriter;
using Batch = BatchSource::Batch;

int64_t RowsOf(const Batch& batch) {
  return batch.empty() || batch[0].dims() == 0 ? 0 : batch[0].dim_size(0);
}

absl::Status Join(const std::vector<Batch>& pieces, Batch* joined) {
  if (pieces.size() == 1) {
    *joined = pieces[0];
    return absl::OkStatus();
  }
  joined->resize(pieces[0].size());
  for (size_t i = 0; i < joined->size(); ++i) {
    std::vector<Tensor> parts;
    for (const Batch& piece : pieces) parts.push_back(piece[i]);
    TF_RETURN_IF_ERROR(tensorflow::tensor::Concat(parts, &(*joined)[i]));
  }
  return absl::OkStatus();
}

absl::Status SaveBatch(const std::string& prefix, const std::string& name, const Batch& batch,
                       IteratorStateWriter* writer) {
  TF_RETURN_IF_ERROR(
      writer->WriteScalar(prefix, name + "_size", static_cast<int64_t>(batch.size())));
  for (size_t i = 0; i < batch.size(); ++i) {
    TF_RETURN_IF_ERROR(writer->WriteTensor(prefix, name + "_" + std::to_string(i), batch[i]));
  }
  return absl::OkStatus();
}

absl::Status RestoreBatch(IteratorContext* context, const std::string& prefix,
                          const std::string& name, IteratorStateReader* reader, Batch* batch) {
  int64_t size = 0;
  TF_RETURN_IF_ERROR(reader->ReadScalar(prefix, name + "_size", &size));
  batch->assign(size, Tensor());
  for (int64_t i = 0; i < size; ++i) {
    const std::string key = name + "_" + std::to_string(i);
    TF_RETURN_IF_ERROR(reader->ReadTensor(context->flr(), prefix, key, &(*batch)[i]));
  }
  return absl::OkStatus();
}

std::string NameOf(size_t number) { return "read_" + std::to_string(number); }

}  // namespace

RowRange ShareOfRows(int64_t rows, int64_t replica, int64_t replicas) {
  const int64_t least = rows / replicas, excess = rows % replicas;
  const int64_t start = replica * least + std::min(replica, excess);
  return {start, start + least + (replica < excess ? 1 : 0)};
}

absl::Status CheckRows(const Tensor& component) {
  if (component.dims() > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "A dataset must yield batches to be split among replicas: the first axis of every component "
      "is the rows. Received: a scalar. Call `.batch(global_batch_size)` on the dataset.");
}

Tensor TakeAlignedRows(const Tensor& component, int64_t start, int64_t stop) {
  Tensor rows = TakeRows(component, start, stop);
  // TensorFlow's kernels require that tensors are aligned in memory, so unaligned rows are copied.
  return rows.IsAligned() ? rows : tensorflow::tensor::DeepCopy(rows);
}

absl::Status BatchSource::Next(IteratorContext* context, IteratorBase* input, int64_t workers,
                               bool* ended) {
  *ended = false;
  const bool again = replay_ && replay_->Take() && !batch_.empty();
  const Place begin = again ? begin_ : end_;
  Place end = begin;
  int64_t rows = 0;
  if (replay_ && replay_->keeps_rows() && begun_) {
    rows = replay_->TakeWanted();
    if (rows == 0) rows = replay_->RowsFor(workers);
    if (rows == 0 && begin.offset > 0) rows = replay_->batch();
  }
  if (rows > 0) {
    TF_RETURN_IF_ERROR(Find(context, input, rows, &end));
  } else {
    TF_RETURN_IF_ERROR(ReadTo(context, input, begin.batches, ended));
    if (!*ended) end = {begin.batches + 1, 0};
  }
  *ended = end == begin;
  if (*ended) return absl::OkStatus();
  read_.erase(read_.begin(), read_.begin() + begin.batches);
  begin_ = {0, begin.offset};
  end_ = {end.batches - begin.batches, end.offset};
  TF_RETURN_IF_ERROR(Take());
  if (!replay_) return absl::OkStatus();
  if (!again) replay_->Count();
  Publish();
  return absl::OkStatus();
}

void BatchSource::Release() {
  if (replay_) return;
  batch_.clear();
  read_.clear();
  begin_ = end_ = {0, 0};
}

absl::Status BatchSource::ReadTo(IteratorContext* context, IteratorBase* input, int64_t number,
                                 bool* ended) {
  while (static_cast<int64_t>(read_.size()) <= number) {
    Batch batch;
    TF_RETURN_IF_ERROR(input->GetNext(context, &batch, ended));
    if (*ended) return absl::OkStatus();
    if (begun_) {
      ++batches_read_;
      rows_read_ += RowsOf(batch);
    } else if (replay_) {
      replay_->SetBatch(RowsOf(batch));
    }
    begun_ = true;
    read_.push_back(std::move(batch));
  }
  return absl::OkStatus();
}

absl::Status BatchSource::Find(IteratorContext* context, IteratorBase* input, int64_t rows,
                               Place* end) {
  while (rows > 0) {
    bool ended = false;
    TF_RETURN_IF_ERROR(ReadTo(context, input, end->batches, &ended));
    if (ended) break;
    TF_RETURN_IF_ERROR(Check(end->batches));
    const int64_t there = RowsOf(read_[end->batches]) - end->offset;
    if (rows < there) {
      end->offset += rows;
      break;
    }
    rows -= there;
    *end = {end->batches + 1, 0};
  }
  return absl::OkStatus();
}

absl::Status BatchSource::Take() {
  if (begin_.offset == 0 && end_ == Place{1, 0}) {
    batch_ = read_[0];
    return absl::OkStatus();
  }
  std::vector<Batch> pieces;
  for (int64_t i = 0; i <= end_.batches && i < static_cast<int64_t>(read_.size()); ++i) {
    const int64_t start = i == 0 ? begin_.offset : 0;
    const int64_t stop = i == end_.batches ? end_.offset : RowsOf(read_[i]);
    if (start == stop) continue;
    Batch& piece = pieces.emplace_back();
    for (const Tensor& component : read_[i]) piece.push_back(TakeRows(component, start, stop));
  }
  if (pieces.empty()) pieces.push_back(read_[0]);  // all of these batches have no rows
  return Join(pieces, &batch_);
}

absl::Status BatchSource::Check(int64_t number) const {
  const std::string remedy = " Pass batches of one size, or Elastic(batch=\"global\").";
  const Batch &first = read_[0], &batch = read_[number];
  const int64_t most = replay_->batch();
  for (size_t i = 0; i < batch.size(); ++i) {
    if (batch[i].dims() == 0 || batch[i].dim_size(0) != RowsOf(batch)) {
      return absl::InvalidArgumentError(
          "The components of a batch must have the same number of rows, for "
          "Elastic(batch=\"per_worker\") to draw batches of another size from them. Received: "
          "shapes " +
          batch[0].shape().DebugString() + " and " + batch[i].shape().DebugString() + "." + remedy);
    }
    tensorflow::TensorShape before = first[i].shape(), now = batch[i].shape();
    before.RemoveDim(0);
    now.RemoveDim(0);
    if (before != now) {
      return absl::InvalidArgumentError(
          "The rows of all batches must have the same shape, for Elastic(batch=\"per_worker\") to "
          "draw batches of another size from them. Received: " +
          before.DebugString() + " and " + now.DebugString() + "." + remedy);
    }
  }
  if (RowsOf(batch) > most) {
    return absl::InvalidArgumentError(
        "No batch of a dataset may be larger than its first one, for "
        "Elastic(batch=\"per_worker\"). Received: " +
        std::to_string(RowsOf(batch)) + " rows, after " + std::to_string(most) + "." + remedy);
  }
  return absl::OkStatus();
}

RowCounts BatchSource::CountsAt(const Place& place) const {
  RowCounts counts{batches_read_, rows_read_, -place.offset, 0};
  for (size_t i = place.batches; i < read_.size(); ++i) {
    counts.pending += RowsOf(read_[i]);
    ++counts.pending_batches;
  }
  return counts;
}

void BatchSource::Publish() {
  const RowCounts now = CountsAt(end_);
  // The first copy of the first batch is not part of the data. If only this copy has been read, the
  // position before the last batch is the same as the current position.
  replay_->Publish(now, batches_read_ > 0 ? CountsAt(begin_) : now);
}

absl::Status BatchSource::Save(const std::string& prefix, IteratorStateWriter* writer) {
  for (const auto& [key, value] : {std::pair<std::string, int64_t>{"begun", begun_ ? 1 : 0},
                                   {"batches_read", batches_read_},
                                   {"rows_read", rows_read_},
                                   {"begin_offset", begin_.offset},
                                   {"end_batches", end_.batches},
                                   {"end_offset", end_.offset},
                                   {"has_batch", batch_.empty() ? 0 : 1},
                                   {"size", static_cast<int64_t>(read_.size())}}) {
    TF_RETURN_IF_ERROR(writer->WriteScalar(prefix, key, value));
  }
  for (size_t i = 0; i < read_.size(); ++i) {
    TF_RETURN_IF_ERROR(SaveBatch(prefix, NameOf(i), read_[i], writer));
  }
  return absl::OkStatus();
}

absl::Status BatchSource::Restore(IteratorContext* context, const std::string& prefix,
                                  IteratorStateReader* reader) {
  int64_t begun = 0, has_batch = 0, size = 0;
  begin_ = {0, 0};
  for (const auto& [key, value] : {std::pair<std::string, int64_t*>{"begun", &begun},
                                   {"batches_read", &batches_read_},
                                   {"rows_read", &rows_read_},
                                   {"begin_offset", &begin_.offset},
                                   {"end_batches", &end_.batches},
                                   {"end_offset", &end_.offset},
                                   {"has_batch", &has_batch},
                                   {"size", &size}}) {
    TF_RETURN_IF_ERROR(reader->ReadScalar(prefix, key, value));
  }
  begun_ = begun != 0;
  read_.assign(size, Batch());
  for (int64_t i = 0; i < size; ++i) {
    TF_RETURN_IF_ERROR(RestoreBatch(context, prefix, NameOf(i), reader, &read_[i]));
  }
  batch_.clear();
  if (has_batch != 0) TF_RETURN_IF_ERROR(Take());
  if (replay_) Publish();
  return absl::OkStatus();
}

}  // namespace tfdist::tf

// The dataset that divides the rows of each batch among replicas. If possible, a replica's share
// refers to the memory of the batch instead of a copy of the rows.

namespace tfdist::tf {
namespace {

using tensorflow::AttrValue;
using tensorflow::DataTypeVector;
using tensorflow::Node;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::PartialTensorShape;
using tensorflow::Tensor;
using tensorflow::data::DatasetBase;
using tensorflow::data::DatasetContext;
using tensorflow::data::DatasetIterator;
using tensorflow::data::IteratorBase;
using tensorflow::data::IteratorContext;
using tensorflow::data::IteratorStateReader;
using tensorflow::data::IteratorStateWriter;
using tensorflow::data::SerializationContext;

constexpr char kType[] = "TfdistSharesDataset";

struct Settings {
  std::string communicator;
  int64_t worker = 0, workers = 1, replicas = 1;
  bool splits = true;
  int64_t replay = 0;
  DataTypeVector output_types;
  std::vector<PartialTensorShape> output_shapes;
};

struct Place {
  int64_t worker, workers;
};

class SharesDataset : public DatasetBase {
 public:
  SharesDataset(OpKernelContext* context, const DatasetBase* input, Settings settings,
                std::shared_ptr<Replay> replay)
      : DatasetBase(DatasetContext(context)),
        input_(input),
        settings_(std::move(settings)),
        replay_(std::move(replay)) {
    input_->Ref();
  }
  ~SharesDataset() override { input_->Unref(); }

  std::unique_ptr<IteratorBase> MakeIteratorInternal(const std::string& prefix) const override {
    return std::make_unique<Iterator>(Iterator::Params{this, prefix + "::TfdistShares"});
  }

  const DataTypeVector& output_dtypes() const override { return settings_.output_types; }
  const std::vector<PartialTensorShape>& output_shapes() const override {
    return settings_.output_shapes;
  }
  std::string DebugString() const override { return "TfdistSharesDatasetOp::Dataset"; }

  int64_t CardinalityInternal(tensorflow::data::CardinalityOptions options) const override {
    const int64_t batches = input_->Cardinality(options);
    return batches < 0 ? batches : batches * settings_.replicas;
  }
  absl::Status InputDatasets(std::vector<const DatasetBase*>* inputs) const override {
    inputs->push_back(input_);
    return absl::OkStatus();
  }
  absl::Status CheckExternalState() const override { return input_->CheckExternalState(); }

 protected:
  absl::Status AsGraphDefInternal(SerializationContext* context, DatasetGraphDefBuilder* builder,
                                  Node** output) const override {
    Node* input = nullptr;
    TF_RETURN_IF_ERROR(builder->AddInputDataset(context, input_, &input));
    AttrValue communicator, worker, workers, replicas, splits, replay;
    builder->BuildAttrValue(settings_.communicator, &communicator);
    builder->BuildAttrValue(settings_.worker, &worker);
    builder->BuildAttrValue(settings_.workers, &workers);
    builder->BuildAttrValue(settings_.replicas, &replicas);
    builder->BuildAttrValue(settings_.splits, &splits);
    builder->BuildAttrValue(settings_.replay, &replay);
    return builder->AddDataset(this, {input},
                               {{"communicator", communicator},
                                {"worker", worker},
                                {"workers", workers},
                                {"replicas", replicas},
                                {"splits", splits},
                                {"replay", replay}},
                               output);
  }

 private:
  class Iterator : public DatasetIterator<SharesDataset> {
   public:
    explicit Iterator(const Params& params)
        : DatasetIterator<SharesDataset>(params), source_(params.dataset->replay_) {}

    absl::Status Initialize(IteratorContext* context) override {
      return dataset()->input_->MakeIterator(context, this, prefix(), &input_);
    }

    absl::Status GetNextInternal(IteratorContext* context, std::vector<Tensor>* element,
                                 bool* ended) override {
      const tensorflow::mutex_lock lock(mutex_);
      *ended = false;
      // If a step fails, perhaps only the first replicas have read their shares of the batch. When
      // the batch is repeated, it therefore begins again with the first replica.
      if (source_.is_asked_again()) next_ = 0;
      if (next_ == 0) {
        TF_RETURN_IF_ERROR(FindPlace());
        TF_RETURN_IF_ERROR(source_.Next(context, input_.get(), place_.workers, ended));
        if (*ended) return absl::OkStatus();
      }
      TF_RETURN_IF_ERROR(Share(element));
      next_ = (next_ + 1) % dataset()->settings_.replicas;
      if (next_ == 0) source_.Release();
      return absl::OkStatus();
    }

   protected:
    std::shared_ptr<tensorflow::data::model::Node> CreateNode(
        IteratorContext*, tensorflow::data::model::Node::Args args) const override {
      return tensorflow::data::model::MakeKnownRatioNode(
          std::move(args), 1.0 / static_cast<double>(dataset()->settings_.replicas));
    }

    absl::Status SaveInternal(SerializationContext* context, IteratorStateWriter* writer) override {
      const tensorflow::mutex_lock lock(mutex_);
      TF_RETURN_IF_ERROR(SaveInput(context, writer, input_));
      TF_RETURN_IF_ERROR(writer->WriteScalar(prefix(), "next", next_));
      return source_.Save(prefix(), writer);
    }

    absl::Status RestoreInternal(IteratorContext* context, IteratorStateReader* reader) override {
      const tensorflow::mutex_lock lock(mutex_);
      TF_RETURN_IF_ERROR(RestoreInput(context, reader, input_));
      TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), "next", &next_));
      TF_RETURN_IF_ERROR(source_.Restore(context, prefix(), reader));
      return FindPlace();
    }

   private:
    absl::Status FindPlace() TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      const Settings& settings = dataset()->settings_;
      place_ = {settings.worker, settings.workers};
      if (!settings.splits || settings.communicator.empty()) return absl::OkStatus();
      try {
        const auto group = FindNamed(settings.communicator);
        place_ = {group->rank(), group->size()};
        return absl::OkStatus();
      } catch (const Error& error) { return ToStatus(error); }
    }

    absl::Status Share(std::vector<Tensor>* element) TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      const Settings& settings = dataset()->settings_;
      if (!settings.splits) {
        *element = source_.batch();
        element->emplace_back(next_);
        return absl::OkStatus();
      }
      const std::vector<Tensor>& batch = source_.batch();
      element->resize(batch.size());
      const auto& replay = dataset()->replay_;
      const Place place = replay && replay->gives_whole() ? Place{0, 1} : place_;
      const int64_t replica = place.worker * settings.replicas + next_;
      for (size_t i = 0; i < batch.size(); ++i) {
        TF_RETURN_IF_ERROR(CheckRows(batch[i]));
        const RowRange share =
            ShareOfRows(batch[i].dim_size(0), replica, place.workers * settings.replicas);
        (*element)[i] = TakeAlignedRows(batch[i], share.start, share.stop);
      }
      return absl::OkStatus();
    }

    tensorflow::mutex mutex_;
    std::unique_ptr<IteratorBase> input_ TF_GUARDED_BY(mutex_);
    BatchSource source_ TF_GUARDED_BY(mutex_);
    // The index, within this process, of the replica that gets the next element.
    int64_t next_ TF_GUARDED_BY(mutex_) = 0;
    Place place_ TF_GUARDED_BY(mutex_) = {0, 1};
  };

  const DatasetBase* const input_;
  const Settings settings_;
  const std::shared_ptr<Replay> replay_;
};

class SharesDatasetOp : public tensorflow::data::UnaryDatasetOpKernel {
 public:
  explicit SharesDatasetOp(OpKernelConstruction* construction)
      : UnaryDatasetOpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("communicator", &settings_.communicator));
    OP_REQUIRES_OK(construction, construction->GetAttr("worker", &settings_.worker));
    OP_REQUIRES_OK(construction, construction->GetAttr("workers", &settings_.workers));
    OP_REQUIRES_OK(construction, construction->GetAttr("replicas", &settings_.replicas));
    OP_REQUIRES_OK(construction, construction->GetAttr("splits", &settings_.splits));
    OP_REQUIRES_OK(construction, construction->GetAttr("replay", &settings_.replay));
    OP_REQUIRES_OK(construction, construction->GetAttr("output_types", &settings_.output_types));
    OP_REQUIRES_OK(construction, construction->GetAttr("output_shapes", &settings_.output_shapes));
  }

 protected:
  void MakeDataset(OpKernelContext* context, DatasetBase* input, DatasetBase** output) override {
    std::shared_ptr<Replay> replay;
    try {
      if (settings_.replay != 0) replay = FindReplay(settings_.replay);
    } catch (const Error& error) { OP_REQUIRES_OK(context, ToStatus(error)); }
    *output = new SharesDataset(context, input, settings_, std::move(replay));
  }

 private:
  Settings settings_;
};

REGISTER_KERNEL_BUILDER(Name(kType).Device(tensorflow::DEVICE_CPU), SharesDatasetOp);

}  // namespace
}  // namespace tfdist::tf
