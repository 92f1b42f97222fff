// The dataset of the replicas' rows of each batch: a share refers to the batch's memory where it can.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "control/replay.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/tensor_util.h"
#include "tf/batch_source.h"
#include "tf/collective_op.h"
#include "tf/rows.h"

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

// The rows of one replica of all.
absl::Status TakeShare(const Tensor& batch, int64_t replica, int64_t replicas, Tensor* share) {
  if (batch.dims() == 0) {
    return absl::InvalidArgumentError(
        "A dataset must yield batches to be split among replicas: the first axis of every component "
        "is the rows. Received: a scalar. Call `.batch(global_batch_size)` on the dataset.");
  }
  const int64_t least = batch.dim_size(0) / replicas, excess = batch.dim_size(0) % replicas;
  const int64_t start = replica * least + std::min(replica, excess);
  *share = TakeRows(batch, start, start + least + (replica < excess ? 1 : 0));
  // TensorFlow's kernels rely on it.
  if (!share->IsAligned()) *share = tensorflow::tensor::DeepCopy(*share);
  return absl::OkStatus();
}

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
      // A step that failed may have read the shares of the first replicas only.
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
      } catch (const Error& error) {
        return ToStatus(error);
      }
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
        TF_RETURN_IF_ERROR(TakeShare(batch[i], replica, place.workers * settings.replicas,
                                     &(*element)[i]));
      }
      return absl::OkStatus();
    }

    tensorflow::mutex mutex_;
    std::unique_ptr<IteratorBase> input_ TF_GUARDED_BY(mutex_);
    BatchSource source_ TF_GUARDED_BY(mutex_);
    int64_t next_ TF_GUARDED_BY(mutex_) = 0;  // of this process's replicas
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
    } catch (const Error& error) {
      OP_REQUIRES_OK(context, ToStatus(error));
    }
    *output = new SharesDataset(context, input, settings_, std::move(replay));
  }

 private:
  Settings settings_;
};

REGISTER_KERNEL_BUILDER(Name(kType).Device(tensorflow::DEVICE_CPU), SharesDatasetOp);

}  // namespace
}  // namespace tfdist::tf
