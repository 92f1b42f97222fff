#include <memory>
#include <string>
#include <vector>

#include "reduce/reduce.h"
#include "tf/on_device.h"
#include "tf/reducing_op.h"

namespace tfdist::tf {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

ReducingOp::ReducingOp(OpKernelConstruction* construction, Kind kind)
    : CollectiveOp(construction, kind) {
  std::string name;
  OP_REQUIRES_OK(construction, construction->GetAttr("op", &name));
  op_ = ReductionNamed(name);
}

absl::Status ReducingOp::Prepare(OpKernelContext* context, const Communicator& group,
                                 Operation* operation) {
  CheckReducible(operation->fingerprint.type, op_);
  operation->fingerprint.op = op_;
  return Lay(context, group, operation);
}

AllReduceOp::AllReduceOp(OpKernelConstruction* construction)
    : ReducingOp(construction, Kind::kAllReduce) {
  OP_REQUIRES_OK(construction, construction->GetAttr("awaited", &awaited_));
}

absl::Status AllReduceOp::Lay(OpKernelContext* context, const Communicator&,
                              Operation* operation) {
  const int count = context->num_inputs() - 1;
  TF_RETURN_IF_ERROR(LayList(context, count, operation));
  operation->launches = awaited_;
  // The GPU uses them after the end of this operation.
  if (awaited_) operation->kept = KeepList(context, count);
  return absl::OkStatus();
}

absl::Status AwaitOp::Prepare(OpKernelContext* context, const Communicator&,
                              Operation* operation) {
  for (int i = 1; i < context->num_inputs(); ++i) {
    context->set_output(i - 1, context->input(i));
    operation->fingerprint.AddShape(Dims(context->input(i).shape()));
  }
  operation->awaits = true;
  return absl::OkStatus();
}

absl::Status ReduceScatterOp::Lay(OpKernelContext* context, const Communicator& group,
                                  Operation* operation) {
  const Tensor& tensor = context->input(1);
  const int parts = group.participants();
  if (tensor.dims() == 0 || tensor.dim_size(0) % parts != 0) {
    return absl::InvalidArgumentError("reduce_scatter cuts the first axis into " +
                                      std::to_string(parts) + " equal parts. Received: shape " +
                                      tensor.shape().DebugString() +
                                      ". Pad it to a multiple of the number of ranks.");
  }
  TensorShape part = tensor.shape();
  part.set_dim(0, tensor.dim_size(0) / parts);
  Tensor* result = nullptr;
  TF_RETURN_IF_ERROR(context->allocate_output(0, part, &result));
  operation->in = Read(tensor);
  operation->out = Written(result);
  operation->fingerprint.AddShape(Dims(tensor.shape()));
  return absl::OkStatus();
}

namespace {

#define TFDIST_KERNEL(name, kernel)                                                       \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), kernel);

TFDIST_KERNEL("TfdistAllReduce", AllReduceOp)
TFDIST_KERNEL("TfdistReduceScatter", ReduceScatterOp)
TFDIST_KERNEL("TfdistAwait", AwaitOp)
REGISTER_KERNEL_BUILDER(Name("TfdistAwait").Device(tensorflow::DEVICE_GPU).HostMemory("token"),
                        OnDevice<AwaitOp>);

#define TFDIST_ON_DEVICE(type)                                     \
  REGISTER_KERNEL_BUILDER(Name("TfdistAllReduce")                  \
                              .Device(tensorflow::DEVICE_GPU)      \
                              .TypeConstraint<type>("T")           \
                              .HostMemory("token"),                \
                          OnDevice<AllReduceOp>);                  \
  REGISTER_KERNEL_BUILDER(Name("TfdistReduceScatter")              \
                              .Device(tensorflow::DEVICE_GPU)      \
                              .TypeConstraint<type>("T")           \
                              .HostMemory("token"),                \
                          OnDevice<ReduceScatterOp>);
TFDIST_FOR_DEVICE_TYPES(TFDIST_ON_DEVICE)
#undef TFDIST_ON_DEVICE

REGISTER_KERNEL_BUILDER(Name("TfdistAllReduce")
                            .Device(tensorflow::DEVICE_GPU)
                            .TypeConstraint<tensorflow::int32>("T")
                            .HostMemory("token")
                            .HostMemory("tensors")
                            .HostMemory("reduced"),
                        AllReduceOp);
REGISTER_KERNEL_BUILDER(Name("TfdistReduceScatter")
                            .Device(tensorflow::DEVICE_GPU)
                            .TypeConstraint<tensorflow::int32>("T")
                            .HostMemory("token")
                            .HostMemory("tensor")
                            .HostMemory("part"),
                        ReduceScatterOp);

}  // namespace
}  // namespace tfdist::tf
