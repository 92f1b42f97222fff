#include "tf/on_device.h"

#include <memory>
#include <string>
#include <utility>

#include "device/gpu.h"
#include "xla/stream_executor/stream.h"

namespace tfdist::tf {
namespace {

// A point in TensorFlow's stream, in whose order its memory is used.
class Turn {
 public:
  Turn(std::shared_ptr<const Gpu> gpu, cuda::Stream* stream)
      : gpu_(std::move(gpu)), stream_(stream), event_(*gpu_) {
    Take();
  }
  void Take() { event_.Record(stream_); }
  cuda::Event* event() const { return event_.get(); }

 private:
  const std::shared_ptr<const Gpu> gpu_;
  cuda::Stream* const stream_;
  DeviceEvent event_;
};

}  // namespace

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

absl::Status CheckGpu(const Communicator& group, int64_t gpu) {
  if (gpu >= 0 && gpu < static_cast<int64_t>(group.gpus().size())) return absl::OkStatus();
  return absl::InvalidArgumentError("The tensors are on GPU " + std::to_string(gpu) +
                                    " of the communicator '" + group.name() + "', which has " +
                                    std::to_string(group.gpus().size()) + ".");
}

CopyBytes CopyIn(std::shared_ptr<const Gpu> gpu, cuda::Stream* stream) {
  return [gpu = std::move(gpu), stream](void* to, const void* from, size_t bytes) {
    if (bytes == 0) return;
    gpu->Use();
    cuda::Check(cuda::Load().cuMemcpyAsync(cuda::AddressOf(to), cuda::AddressOf(from), bytes, stream),
                "cuMemcpyAsync");
  };
}

absl::Status TakeTurn(tensorflow::OpKernelContext* context, const Communicator& group, int64_t gpu,
                      Operation* operation) {
  TF_RETURN_IF_ERROR(CheckGpu(group, gpu));
  cuda::Stream* stream = nullptr;
  TF_RETURN_IF_ERROR(FindStream(context, &stream));
  const auto turn = std::make_shared<Turn>(group.gpus()[static_cast<size_t>(gpu)], stream);
  operation->device = turn->event();
  operation->kept = std::make_shared<std::pair<std::shared_ptr<Turn>, std::shared_ptr<void>>>(
      turn, operation->kept);
  if (!operation->allocate) return absl::OkStatus();
  operation->allocate = [turn = turn.get(), allocate = std::move(operation->allocate)](
                            const std::vector<size_t>& rows) {
    Pieces made = allocate(rows);
    turn->Take();
    return made;
  };
  return absl::OkStatus();
}

}  // namespace tfdist::tf
