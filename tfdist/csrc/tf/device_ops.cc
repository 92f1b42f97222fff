// The kernels of collectives in a GPU's memory.
#include <memory>
#include <utility>

#include "device/gpu.h"
#include "tf/compressing_op.h"
#include "tf/reducing_op.h"
#include "xla/stream_executor/stream.h"

namespace tfdist::tf {
namespace {

// TensorFlow's memory is used in the order of its stream: what an operation reads has been computed,
// and what it writes is free, once this point of the stream has passed.
struct Turn {
  Turn(std::shared_ptr<const Gpu> given, cuda::Stream* stream) : gpu(std::move(given)), event(*gpu) {
    event.Record(stream);
  }
  const std::shared_ptr<const Gpu> gpu;
  DeviceEvent event;
};

// A CPU has none: all that came before it has ended.
absl::Status FindStream(tensorflow::OpKernelContext* context, cuda::Stream** stream) {
  const tensorflow::DeviceContext* const device = context->op_device_context();
  if (device && device->stream()) {
    *stream = static_cast<cuda::Stream*>(device->stream()->platform_specific_handle().stream);
  } else if (context->device()->device_type() != tensorflow::DEVICE_CPU) {
    return absl::InternalError("TensorFlow gives no stream for an operation on " +
                               context->device()->name() + ".");
  }
  return absl::OkStatus();
}

absl::Status CheckGpu(const Communicator& group) {
  if (group.gpu()) return absl::OkStatus();
  return absl::InvalidArgumentError("The tensors are on a GPU, and the communicator '" +
                                    group.name() + "' has none.");
}

// After all that the operation needs has been given to TensorFlow's stream.
absl::Status WaitForTurn(tensorflow::OpKernelContext* context, const Communicator& group,
                         Operation* operation) {
  TF_RETURN_IF_ERROR(CheckGpu(group));
  cuda::Stream* stream = nullptr;
  TF_RETURN_IF_ERROR(FindStream(context, &stream));
  const auto turn = std::make_shared<Turn>(group.gpu(), stream);
  operation->device = turn->event.get();
  operation->kept = std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(
      std::move(operation->kept), turn);
  return absl::OkStatus();
}

}  // namespace

absl::Status DeviceAllReduceOp::Lay(tensorflow::OpKernelContext* context,
                                    const Communicator& group, Operation* operation) {
  TF_RETURN_IF_ERROR(AllReduceOp::Lay(context, group, operation));
  return WaitForTurn(context, group, operation);
}

absl::Status DeviceCompressedAllReduceOp::Prepare(tensorflow::OpKernelContext* context,
                                                  const Communicator& group,
                                                  Operation* operation) {
  TF_RETURN_IF_ERROR(CompressedAllReduceOp::Prepare(context, group, operation));
  return WaitForTurn(context, group, operation);
}

absl::Status DeviceCompressedAllReduceOp::FindCopy(tensorflow::OpKernelContext* context,
                                                   const Communicator& group,
                                                   CopyBytes* copy) const {
  TF_RETURN_IF_ERROR(CheckGpu(group));
  cuda::Stream* stream = nullptr;
  TF_RETURN_IF_ERROR(FindStream(context, &stream));
  *copy = [gpu = group.gpu(), stream](void* to, const void* from, size_t bytes) {
    gpu->Use();
    cuda::Check(cuda::Load().cuMemcpyAsync(reinterpret_cast<uintptr_t>(to),
                                           reinterpret_cast<uintptr_t>(from), bytes, stream),
                "cuMemcpyAsync");
  };
  return absl::OkStatus();
}

namespace {

// TensorFlow keeps the int32 tensors of a GPU's operations in the host's memory.
#define TFDIST_ALL_REDUCE(type)                                    \
  REGISTER_KERNEL_BUILDER(Name("TfdistAllReduce")                  \
                              .Device(tensorflow::DEVICE_GPU)      \
                              .TypeConstraint<type>("T")           \
                              .HostMemory("token"),                \
                          DeviceAllReduceOp);
TFDIST_ALL_REDUCE(bool)
TFDIST_ALL_REDUCE(tensorflow::uint8)
TFDIST_ALL_REDUCE(tensorflow::int8)
TFDIST_ALL_REDUCE(tensorflow::int64)
TFDIST_ALL_REDUCE(Eigen::half)
TFDIST_ALL_REDUCE(tensorflow::bfloat16)
TFDIST_ALL_REDUCE(float)
TFDIST_ALL_REDUCE(double)
#undef TFDIST_ALL_REDUCE
REGISTER_KERNEL_BUILDER(Name("TfdistAllReduce")
                            .Device(tensorflow::DEVICE_GPU)
                            .TypeConstraint<tensorflow::int32>("T")
                            .HostMemory("token")
                            .HostMemory("tensors")
                            .HostMemory("reduced"),
                        AllReduceOp);
REGISTER_KERNEL_BUILDER(Name("TfdistCompressedAllReduce")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("token")
                            .HostMemory("errors")
                            .HostMemory("seed"),
                        DeviceCompressedAllReduceOp);

}  // namespace
}  // namespace tfdist::tf
