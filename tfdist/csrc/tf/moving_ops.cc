// The kernels of the collectives that do not reduce.
#include <numeric>

#include "tf/moving_ops.h"
#include "tf/on_device.h"

namespace tfdist::tf {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Allocates output 0 for the rows that this rank receives from all ranks.
BufferList AllocateRows(OpKernelContext* context, const std::vector<size_t>& received) {
  const size_t rows = std::accumulate(received.begin(), received.end(), size_t{0});
  TensorShape shape = context->input(1).shape();
  Tensor* result = nullptr;
  // This fails if there are more rows than a dimension of a shape can have. So many rows are
  // possible only if a row has a size of 0 bytes.
  absl::Status status = shape.SetDimWithStatus(0, static_cast<int64_t>(rows));
  if (status.ok()) status = context->allocate_output(0, shape, &result);
  if (!status.ok()) throw Error(Code::kInternal, std::string(status.message()));
  return Written(result);
}

}  // namespace

absl::Status AllGatherOp::Prepare(OpKernelContext* context, const Communicator&,
                                  Operation* operation) {
  const Tensor& tensor = context->input(1);
  TF_RETURN_IF_ERROR(AddRows(tensor, "all_gather", operation));
  operation->in = Read(tensor);
  operation->sent_rows = {static_cast<size_t>(tensor.dim_size(0))};
  operation->allocate = [context](const std::vector<size_t>& received) {
    return AllocateRows(context, received);
  };
  return absl::OkStatus();
}

SendOp::SendOp(OpKernelConstruction* construction) : CollectiveOp(construction, Kind::kSend) {
  OP_REQUIRES_OK(construction, construction->GetAttr("rank", &rank_));
}

absl::Status SendOp::Prepare(OpKernelContext* context, const Communicator&, Operation* operation) {
  operation->peer = static_cast<int>(rank_);
  operation->in = Read(context->input(1));
  operation->fingerprint.AddShape(Dims(context->input(1).shape()));
  return absl::OkStatus();
}

ReceiveOp::ReceiveOp(OpKernelConstruction* construction)
    : CollectiveOp(construction, Kind::kReceive) {
  OP_REQUIRES_OK(construction, construction->GetAttr("rank", &rank_));
}

absl::Status ReceiveOp::Prepare(OpKernelContext* context, const Communicator&,
                                Operation* operation) {
  const Tensor& dims = context->input(1);
  TensorShape shape;
  if (dims.dims() != 1) {
    return absl::InvalidArgumentError("The shape to receive must be a vector. Received: shape " +
                                      dims.shape().DebugString() + ".");
  }
  TF_RETURN_IF_ERROR(TensorShape::BuildTensorShape(dims.vec<int64_t>(), &shape));
  Tensor* result = nullptr;
  TF_RETURN_IF_ERROR(context->allocate_output(0, shape, &result));
  operation->peer = static_cast<int>(rank_);
  operation->out = Written(result);
  operation->fingerprint.type = FromTensorFlow(result->dtype());
  operation->fingerprint.AddShape(Dims(shape));
  return absl::OkStatus();
}

BroadcastOp::BroadcastOp(OpKernelConstruction* construction)
    : CollectiveOp(construction, Kind::kBroadcast) {
  OP_REQUIRES_OK(construction, construction->GetAttr("root", &root_));
}

absl::Status BroadcastOp::Prepare(OpKernelContext* context, const Communicator&,
                                  Operation* operation) {
  const Tensor& tensor = context->input(1);
  Tensor* result = nullptr;
  TF_RETURN_IF_ERROR(context->forward_input_or_allocate_output({1}, 0, tensor.shape(), &result));
  operation->in = Read(tensor);
  operation->out = Written(result);
  operation->fingerprint.root = static_cast<int32_t>(root_);
  operation->fingerprint.AddShape(Dims(tensor.shape()));
  return absl::OkStatus();
}

namespace {

class AllToAllOp : public CollectiveOp {
 public:
  explicit AllToAllOp(OpKernelConstruction* construction)
      : CollectiveOp(construction, Kind::kAllToAll) {}

 private:
  absl::Status Prepare(OpKernelContext* context, const Communicator& group,
                       Operation* operation) override {
    const Tensor& tensor = context->input(1);
    const Tensor& rows = context->input(2);
    TF_RETURN_IF_ERROR(AddRows(tensor, "all_to_all", operation));
    int64_t total = 0;
    bool impossible = false;
    if (rows.dims() == 1 && rows.dim_size(0) == group.size()) {
      for (int rank = 0; rank < group.size(); ++rank) {
        const int64_t count = rows.vec<int64_t>()(rank);
        // Each count is also checked by itself, because the sum of very large counts may overflow.
        impossible = impossible || count < 0 || count > tensor.dim_size(0);
        total += count;
        operation->sent_rows.push_back(static_cast<size_t>(count));
      }
    }
    if (operation->sent_rows.empty() || impossible || total != tensor.dim_size(0)) {
      return absl::InvalidArgumentError(
          "all_to_all needs a number of rows for each of " + std::to_string(group.size()) +
          " ranks, with the tensor's number of rows as their sum. Received: rows " +
          rows.SummarizeValue(64) + " for a tensor of shape " + tensor.shape().DebugString() + ".");
    }
    Tensor* received_rows = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(1, rows.shape(), &received_rows));
    operation->in = Read(tensor);
    operation->allocate = [context, received_rows](const std::vector<size_t>& received) {
      for (size_t rank = 0; rank < received.size(); ++rank) {
        received_rows->vec<int64_t>()(static_cast<int64_t>(rank)) =
            static_cast<int64_t>(received[rank]);
      }
      return AllocateRows(context, received);
    };
    return absl::OkStatus();
  }
};

class BarrierOp : public CollectiveOp {
 public:
  explicit BarrierOp(OpKernelConstruction* construction)
      : CollectiveOp(construction, Kind::kBarrier) {}

 private:
  absl::Status Prepare(OpKernelContext*, const Communicator&, Operation*) override {
    return absl::OkStatus();
  }
};

#define TFDIST_KERNEL(name, kernel) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), kernel);

TFDIST_KERNEL("TfdistAllGather", AllGatherOp)
TFDIST_KERNEL("TfdistBroadcast", BroadcastOp)
TFDIST_KERNEL("TfdistAllToAll", AllToAllOp)
TFDIST_KERNEL("TfdistSend", SendOp)
TFDIST_KERNEL("TfdistReceive", ReceiveOp)
TFDIST_KERNEL("TfdistBarrier", BarrierOp)

#define TFDIST_GPU(name) Name(name).Device(tensorflow::DEVICE_GPU).HostMemory("token")
#define TFDIST_ON_DEVICE(type)                                                                   \
  REGISTER_KERNEL_BUILDER(TFDIST_GPU("TfdistAllGather").TypeConstraint<type>("T"),               \
                          OnDevice<AllGatherOp>);                                                \
  REGISTER_KERNEL_BUILDER(TFDIST_GPU("TfdistBroadcast").TypeConstraint<type>("T"),               \
                          OnDevice<BroadcastOp>);                                                \
  REGISTER_KERNEL_BUILDER(TFDIST_GPU("TfdistSend").TypeConstraint<type>("T"), OnDevice<SendOp>); \
  REGISTER_KERNEL_BUILDER(                                                                       \
      TFDIST_GPU("TfdistReceive").TypeConstraint<type>("T").HostMemory("shape"),                 \
      OnDevice<ReceiveOp>);
TFDIST_FOR_DEVICE_TYPES(TFDIST_ON_DEVICE)
#undef TFDIST_ON_DEVICE
REGISTER_KERNEL_BUILDER(TFDIST_GPU("TfdistAllGather")
                            .TypeConstraint<tensorflow::int32>("T")
                            .HostMemory("tensor")
                            .HostMemory("gathered"),
                        AllGatherOp);
REGISTER_KERNEL_BUILDER(TFDIST_GPU("TfdistBroadcast")
                            .TypeConstraint<tensorflow::int32>("T")
                            .HostMemory("tensor")
                            .HostMemory("value"),
                        BroadcastOp);

// An all-to-all has no kernel for GPU memory, so tensors of all types are in host memory.
REGISTER_KERNEL_BUILDER(TFDIST_GPU("TfdistAllToAll")
                            .HostMemory("tensor")
                            .HostMemory("rows")
                            .HostMemory("received")
                            .HostMemory("received_rows"),
                        AllToAllOp);
REGISTER_KERNEL_BUILDER(
    TFDIST_GPU("TfdistSend").TypeConstraint<tensorflow::int32>("T").HostMemory("tensor"), SendOp);
REGISTER_KERNEL_BUILDER(TFDIST_GPU("TfdistReceive")
                            .TypeConstraint<tensorflow::int32>("T")
                            .HostMemory("shape")
                            .HostMemory("tensor"),
                        ReceiveOp);
REGISTER_KERNEL_BUILDER(TFDIST_GPU("TfdistBarrier"), BarrierOp);

}  // namespace
}  // namespace tfdist::tf
