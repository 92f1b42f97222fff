#include "tf/on_device.h"

#include <deque>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "control/activity.h"
#include "device/gpu.h"
#include "device/kernel_launch.h"
#include "device/stream_waits.h"
#include "error.h"
#include "registry.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tf/collective_op.h"
#include "xla/stream_executor/stream.h"

namespace tfdist::tf {
namespace {

// An event that marks a point in TensorFlow's stream. TensorFlow reuses its GPU memory in the order
// of the work in this stream. Once the stream has reached the point, it is therefore safe to use
// all memory that TensorFlow had allocated when the event was recorded.
class StreamPoint {
 public:
  StreamPoint(std::shared_ptr<const Gpu> gpu, cuda::Stream* stream)
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
    return absl::InternalError("TensorFlow provides no stream for an operation on " +
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
    cuda::Check(
        cuda::Load().cuMemcpyAsync(cuda::AddressOf(to), cuda::AddressOf(from), bytes, stream),
        "cuMemcpyAsync");
  };
}

absl::Status FollowStream(tensorflow::OpKernelContext* context, const Communicator& group,
                          int64_t gpu, Operation* operation) {
  TF_RETURN_IF_ERROR(CheckGpu(group, gpu));
  cuda::Stream* stream = nullptr;
  TF_RETURN_IF_ERROR(FindStream(context, &stream));
  const auto point = std::make_shared<StreamPoint>(group.gpus()[static_cast<size_t>(gpu)], stream);
  operation->device = point->event();
  operation->kept =
      std::make_shared<std::pair<std::shared_ptr<StreamPoint>, std::shared_ptr<void>>>(
          point, operation->kept);
  if (!operation->allocate) return absl::OkStatus();
  operation->allocate = [point = point.get(), allocate = std::move(operation->allocate)](
                            const std::vector<size_t>& rows) {
    BufferList made = allocate(rows);
    point->Take();
    return made;
  };
  return absl::OkStatus();
}

}  // namespace tfdist::tf

namespace tfdist::tf {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

absl::Status FindWork(OpKernelContext* context, const std::string& communicator, LocalWork* work) {
  work->group = FindNamed(communicator);
  TF_RETURN_IF_ERROR(CheckGpu(*work->group, 0));
  return FindStream(context, &work->stream);
}

// Ends a wait for the GPU if the step is canceled or the communicator is aborted. While this rank
// waits here, it has not joined its next collective, so its own timeout does not apply. But the
// other ranks wait in this collective, and after their timeout they abort the communicator.
class StepGuard : public Guard {
 public:
  StepGuard(OpKernelContext* context, Communicator& group)
      : manager_(context->cancellation_manager()), group_(group) {}

  void Check() override {
    group_.CheckAborted();
    if (manager_ && manager_->IsCancelled()) {
      throw Error(Code::kCancelled, "The step has ended before a GPU had selected gradients.");
    }
  }

 private:
  tensorflow::CancellationManager* const manager_;
  Communicator& group_;
};

// Waits until all work that is queued in the stream has finished.
void AwaitStream(OpKernelContext* context, const LocalWork& work) {
  DeviceEvent event(*work.gpu());
  event.Record(work.stream);
  StepGuard guard(context, *work.group);
  try {
    Await(event, guard);
  } catch (...) {
    // The queued work may still use memory that the caller will free, so it gets a short time to
    // finish.
    SettleSoon(work.stream, event);
    throw;
  }
}

// Temporary memory for work that is queued in the stream. TensorFlow may give this memory to later
// ops as soon as this op has ended on the host. This is safe, because the work of later ops is
// queued behind this work.
class Scratch {
 public:
  absl::Status Take(OpKernelContext* context, size_t bytes, bool on_host = false) {
    tensorflow::AllocatorAttributes where;
    where.set_on_host(on_host);
    where.set_gpu_compatible(on_host);
    return context->allocate_temp(tensorflow::DT_UINT8, TensorShape({static_cast<int64_t>(bytes)}),
                                  &room_, where);
  }
  cuda::Address address() const { return cuda::AddressOf(room_.data()); }

 private:
  Tensor room_;
};

// Copies values from GPU memory to host memory, and back.
class HostCopies {
 public:
  HostCopies(OpKernelContext* context, const LocalWork& work)
      : context_(context), work_(work), copy_(CopyIn(work.gpu(), work.stream)) {
    // A copy to pageable memory blocks the host until the stream reaches the copy, without a time
    // limit. Waits for the stream first, because this wait can be ended.
    AwaitStream(context, work);
  }

  template <typename T>
  T* Get(const T* values, size_t count) {
    T* const room = Room<T>(count);
    copy_(room, values, count * sizeof(T));
    return room;
  }
  // Returns host memory for `count` values. This object owns the memory.
  template <typename T>
  T* Room(size_t count) {
    return reinterpret_cast<T*>(rooms_.emplace_back(count * sizeof(T)).data());
  }
  // Copies values to the GPU. `values` must be memory that `Room` has returned.
  template <typename T>
  void Put(const T* values, size_t count, T* to) const {
    copy_(to, values, count * sizeof(T));
  }
  void Await() const { AwaitStream(context_, work_); }

 private:
  OpKernelContext* const context_;
  const LocalWork& work_;
  const CopyBytes copy_;
  std::deque<std::vector<char>> rooms_;
};

}  // namespace

DeviceSelectOp::DeviceSelectOp(OpKernelConstruction* construction) : SelectOp(construction) {
  OP_REQUIRES_OK(construction, construction->GetAttr("communicator", &communicator_));
}

void DeviceSelectOp::Compute(OpKernelContext* context) {
  const SpanScope span("compression", "select");
  try {
    LocalWork work;
    OP_REQUIRES_OK(context, FindWork(context, communicator_, &work));
    Asked asked;
    OP_REQUIRES_OK(context, Ask(context, CopyIn(work.gpu(), work.stream), &asked));
    OP_REQUIRES_OK(context, work.group->kernels() ? SelectByKernels(context, work, asked)
                                                  : SelectOnHost(context, work, asked));
  } catch (const Error& error) { OP_REQUIRES_OK(context, ToStatus(error)); }
}

absl::Status DeviceSelectOp::SelectByKernels(OpKernelContext* context, const LocalWork& work,
                                             const Asked& asked) const {
  KernelSelect select(*work.gpu(), *work.group->kernels(), work.stream, asked.candidates);
  Scratch scratch, counted;
  TF_RETURN_IF_ERROR(scratch.Take(context, select.ScratchBytes()));
  size_t count = 0;
  if (threshold() > 0) {
    TF_RETURN_IF_ERROR(counted.Take(context, sizeof(uint32_t), true));
    auto* const rows = cuda::PointerTo<uint32_t>(counted.address());
    select.FindAbove(threshold(), scratch.address());
    // Queues the copy to host memory only after this wait. If the wait ends with an error, no
    // pending copy can write to host memory that has been freed.
    AwaitStream(context, work);
    CopyIn(work.gpu(), work.stream)(rows, cuda::PointerTo<uint32_t>(select.rows()), sizeof(*rows));
    AwaitStream(context, work);
    count = *rows;
  } else {
    select.FindLargest(asked.selected, scratch.address());
    count = std::accumulate(asked.selected.begin(), asked.selected.end(), size_t{0});
  }
  Row* rows = nullptr;
  TF_RETURN_IF_ERROR(Allocate(context, count, &rows));
  if (count > 0) select.Take(rows);
  return absl::OkStatus();
}

absl::Status DeviceSelectOp::SelectOnHost(OpKernelContext* context, const LocalWork& work,
                                          const Asked& asked) const {
  HostCopies copies(context, work);
  std::vector<Candidates> on_host = asked.candidates;
  for (Candidates& c : on_host) {
    c.in = copies.Get(c.in, c.count);
    if (c.error) c.error = copies.Get(c.error, c.count);
    if (c.momentum) c.momentum = copies.Get(c.momentum, c.count);
  }
  copies.Await();
  const Selected selected(on_host, asked.selected, threshold());
  Row* rows = nullptr;
  TF_RETURN_IF_ERROR(Allocate(context, selected.rows(), &rows));
  Row* const taken = copies.Room<Row>(selected.rows());
  selected.Take(taken);
  copies.Put(taken, selected.rows(), rows);
  for (size_t i = 0; i < on_host.size(); ++i) {
    const Candidates &from = on_host[i], &to = asked.candidates[i];
    if (to.error) copies.Put(from.error, to.count, to.error);
    if (to.momentum) copies.Put(from.momentum, to.count, to.momentum);
  }
  copies.Await();
  return absl::OkStatus();
}

DeviceScatterOp::DeviceScatterOp(OpKernelConstruction* construction) : ScatterOp(construction) {
  OP_REQUIRES_OK(construction, construction->GetAttr("communicator", &communicator_));
}

void DeviceScatterOp::Compute(OpKernelContext* context) {
  const SpanScope span("compression", "scatter");
  try {
    LocalWork work;
    OP_REQUIRES_OK(context, FindWork(context, communicator_, &work));
    Asked asked;
    OP_REQUIRES_OK(context, Ask(context, &asked));
    OP_REQUIRES_OK(context, work.group->kernels() ? SumByKernels(context, work, asked)
                                                  : SumOnHost(context, work, asked));
  } catch (const Error& error) { OP_REQUIRES_OK(context, ToStatus(error)); }
}

absl::Status DeviceScatterOp::SumByKernels(OpKernelContext* context, const LocalWork& work,
                                           const Asked& asked) const {
  const KernelScatter scatter(*work.gpu(), *work.group->kernels(), work.stream,
                              static_cast<size_t>(work.group->size()));
  Scratch scratch;
  TF_RETURN_IF_ERROR(scratch.Take(context, scatter.ScratchBytes()));
  scatter.Sum(asked.rows, asked.count, asked.sums, scratch.address());
  return absl::OkStatus();
}

absl::Status DeviceScatterOp::SumOnHost(OpKernelContext* context, const LocalWork& work,
                                        const Asked& asked) const {
  HostCopies copies(context, work);
  const Row* const rows = copies.Get(asked.rows, asked.count);
  std::vector<RowSums> sums = asked.sums;
  for (RowSums& sum : sums) sum.values = copies.Room<float>(sum.count);
  copies.Await();
  SumRows(rows, asked.count, sums);
  for (size_t i = 0; i < sums.size(); ++i) {
    copies.Put(sums[i].values, sums[i].count, asked.sums[i].values);
  }
  copies.Await();
  return absl::OkStatus();
}

namespace {

REGISTER_KERNEL_BUILDER(Name("TfdistSelect")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("errors")
                            .HostMemory("momenta")
                            .HostMemory("counts")
                            .HostMemory("scales"),
                        DeviceSelectOp);
REGISTER_KERNEL_BUILDER(Name("TfdistScatter").Device(tensorflow::DEVICE_GPU), DeviceScatterOp);

}  // namespace
}  // namespace tfdist::tf
