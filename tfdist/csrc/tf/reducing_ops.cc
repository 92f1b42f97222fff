#include "tf/reducing_ops.h"

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "reduce/reduce.h"
#include "tf/on_device.h"

// The kernel of the compressed all-reduce.

namespace tfdist::tf {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

CompressedAllReduceOp::CompressedAllReduceOp(OpKernelConstruction* construction)
    : CollectiveOp(construction, Kind::kAllReduce) {
  int64_t form = 0, bits = 0, block = 0;
  bool stochastic = false, euclidean = false, unit = false;
  float clip = 0;
  OP_REQUIRES_OK(construction, construction->GetAttr("form", &form));
  OP_REQUIRES_OK(construction, construction->GetAttr("bits", &bits));
  OP_REQUIRES_OK(construction, construction->GetAttr("stochastic", &stochastic));
  OP_REQUIRES_OK(construction, construction->GetAttr("euclidean", &euclidean));
  OP_REQUIRES_OK(construction, construction->GetAttr("unit", &unit));
  OP_REQUIRES_OK(construction, construction->GetAttr("clip", &clip));
  OP_REQUIRES_OK(construction, construction->GetAttr("block", &block));
  OP_REQUIRES_OK(construction, construction->GetAttr("within_hosts", &within_hosts_));
  OP_REQUIRES_OK(construction, construction->GetAttr("awaited", &awaited_));
  OP_REQUIRES_OK(construction, construction->GetAttr("N", &tensors_));
  OP_REQUIRES_OK(construction, construction->GetAttr("M", &errors_));
  try {
    codec_ = MakeCodec(form, bits, stochastic, euclidean, unit, clip, block);
  } catch (const Error& error) { construction->SetStatus(ToStatus(error)); }
}

namespace {

// Keeps objects alive: the variables to which the operation refers, and the tensors that the GPU
// still uses after the kernel has ended.
struct Kept {
  Variables variables;
  std::shared_ptr<std::vector<Tensor>> list;
};

}  // namespace

absl::Status CompressedAllReduceOp::Prepare(OpKernelContext* context, const Communicator& group,
                                            Operation* operation) {
  TF_RETURN_IF_ERROR(LayList(context, tensors_, operation));
  Compression compression;
  compression.codec = codec_;
  compression.within_hosts = within_hosts_;
  const Tensor& given = context->input(tensors_ + errors_ + 1);
  if (given.NumElements() != 1) {
    return absl::InvalidArgumentError(
        "The seed must be a scalar. Received: " + given.shape().DebugString() + ".");
  }
  const int64_t seed = *given.flat<int64_t>().data();
  compression.seed = static_cast<uint32_t>(seed ^ (seed >> 32));
  const auto kept = std::make_shared<Kept>();
  if (errors_ > 0) {
    CopyBytes copy;
    TF_RETURN_IF_ERROR(FindCopy(context, group, &copy));
    TF_RETURN_IF_ERROR(FindErrors(context, copy, &kept->variables, &compression.error));
  }
  operation->launches = awaited_;
  if (awaited_) kept->list = KeepList(context, tensors_);
  operation->kept = kept;
  operation->compression = std::move(compression);
  return absl::OkStatus();
}

absl::Status CompressedAllReduceOp::FindCopy(OpKernelContext*, const Communicator&,
                                             CopyBytes* copy) const {
  *copy = std::memcpy;
  return absl::OkStatus();
}

absl::Status CompressedAllReduceOp::FindErrors(OpKernelContext* context, const CopyBytes& copy,
                                               Variables* variables, BufferList* error) const {
  std::vector<BasicBuffer<char>> buffers;
  for (int i = 0; i < errors_; ++i) {
    const Tensor& values = context->input(1 + i);
    float* taken = nullptr;
    TF_RETURN_IF_ERROR(TakeValues(context, tensors_ + 1 + i, values, copy, variables, &taken));
    buffers.push_back({reinterpret_cast<char*>(taken), values.TotalBytes()});
  }
  *error = BufferList(buffers);
  return absl::OkStatus();
}

absl::Status DeviceCompressedAllReduceOp::FindCopy(OpKernelContext* context,
                                                   const Communicator& group,
                                                   CopyBytes* copy) const {
  TF_RETURN_IF_ERROR(CheckGpu(group, gpu()));
  cuda::Stream* stream = nullptr;
  TF_RETURN_IF_ERROR(FindStream(context, &stream));
  *copy = CopyIn(group.gpus()[static_cast<size_t>(gpu())], stream);
  return absl::OkStatus();
}

namespace {

REGISTER_KERNEL_BUILDER(Name("TfdistCompressedAllReduce").Device(tensorflow::DEVICE_CPU),
                        CompressedAllReduceOp);
REGISTER_KERNEL_BUILDER(Name("TfdistCompressedAllReduce")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("token")
                            .HostMemory("errors")
                            .HostMemory("seed"),
                        DeviceCompressedAllReduceOp);

}  // namespace
}  // namespace tfdist::tf

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

absl::Status AllReduceOp::Lay(OpKernelContext* context, const Communicator&, Operation* operation) {
  const int count = context->num_inputs() - 1;
  TF_RETURN_IF_ERROR(LayList(context, count, operation));
  operation->launches = awaited_;
  // A launched operation continues to use the tensors on the GPU after this kernel has ended.
  if (awaited_) operation->kept = KeepList(context, count);
  return absl::OkStatus();
}

absl::Status AwaitOp::Prepare(OpKernelContext* context, const Communicator&, Operation* operation) {
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

#define TFDIST_KERNEL(name, kernel) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), kernel);

TFDIST_KERNEL("TfdistAllReduce", AllReduceOp)
TFDIST_KERNEL("TfdistReduceScatter", ReduceScatterOp)
TFDIST_KERNEL("TfdistAwait", AwaitOp)
REGISTER_KERNEL_BUILDER(Name("TfdistAwait").Device(tensorflow::DEVICE_GPU).HostMemory("token"),
                        OnDevice<AwaitOp>);

#define TFDIST_ON_DEVICE(type)                                \
  REGISTER_KERNEL_BUILDER(Name("TfdistAllReduce")             \
                              .Device(tensorflow::DEVICE_GPU) \
                              .TypeConstraint<type>("T")      \
                              .HostMemory("token"),           \
                          OnDevice<AllReduceOp>);             \
  REGISTER_KERNEL_BUILDER(Name("TfdistReduceScatter")         \
                              .Device(tensorflow::DEVICE_GPU) \
                              .TypeConstraint<type>("T")      \
                              .HostMemory("token"),           \
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
