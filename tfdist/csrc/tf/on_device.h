// Collective operations on GPUs.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "communicator.h"
#include "device/gpu.h"
#include "tf/collective_op.h"
#include "tf/sparse_op.h"

// The kernels of collectives for tensors in GPU memory. The attribute `gpu` of an op selects one of
// the GPUs of its communicator.

namespace tfdist::tf {

// Makes an operation wait until TensorFlow's stream on the GPU has finished all work that is queued
// in it now. Then the inputs have been computed, and the outputs may be written. If the operation
// allocates memory later, it waits for the stream once more before it uses this memory.
absl::Status FollowStream(tensorflow::OpKernelContext* context, const Communicator& group,
                          int64_t gpu, Operation* operation);

// Returns an error unless the communicator has a GPU with this index.
absl::Status CheckGpu(const Communicator& group, int64_t gpu);
// Finds the stream in which TensorFlow runs this op. On a CPU, `*stream` remains null: all earlier
// work has already finished.
absl::Status FindStream(tensorflow::OpKernelContext* context, cuda::Stream** stream);

// Returns a function that copies memory of a GPU in a stream.
CopyBytes CopyIn(std::shared_ptr<const Gpu> gpu, cuda::Stream* stream);

template <typename Op>
class OnDevice : public Op {
 public:
  explicit OnDevice(tensorflow::OpKernelConstruction* construction) : Op(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("gpu", &gpu_));
  }

 protected:
  absl::Status Prepare(tensorflow::OpKernelContext* context, const Communicator& group,
                       Operation* operation) override {
    TF_RETURN_IF_ERROR(Op::Prepare(context, group, operation));
    return FollowStream(context, group, gpu_, operation);
  }
  void Enqueue(Communicator* group, Operation operation, Communicator::Done done) override {
    group->EnqueuePart(static_cast<size_t>(gpu_), std::move(operation), std::move(done));
  }
  int64_t gpu() const { return gpu_; }

 private:
  int64_t gpu_ = 0;
};

// For ops on a GPU, TensorFlow keeps int32 tensors in host memory, so this list does not contain
// int32.
#define TFDIST_FOR_DEVICE_TYPES(F) \
  F(bool)                          \
  F(tensorflow::uint8)             \
  F(tensorflow::int8)              \
  F(tensorflow::int64)             \
  F(Eigen::half)                   \
  F(tensorflow::bfloat16)          \
  F(float)                         \
  F(double)

}  // namespace tfdist::tf

// The ops of `sparse_op.h` for tensors and variables in GPU memory. They do not wait for other
// ranks, so they run in TensorFlow's stream.

namespace tfdist::tf {

// A communicator with one GPU, and TensorFlow's stream for an op on this GPU.
struct LocalWork {
  std::shared_ptr<Communicator> group;
  cuda::Stream* stream = nullptr;

  const std::shared_ptr<const Gpu>& gpu() const { return group->gpus()[0]; }
};

// Supports only one GPU per worker. If there are no kernels for the GPU, the host does the work and
// selects the same rows.
class DeviceSelectOp : public SelectOp {
 public:
  explicit DeviceSelectOp(tensorflow::OpKernelConstruction* construction);

  void Compute(tensorflow::OpKernelContext* context) override;

 private:
  absl::Status SelectByKernels(tensorflow::OpKernelContext* context, const LocalWork& work,
                               const Asked& asked) const;
  absl::Status SelectOnHost(tensorflow::OpKernelContext* context, const LocalWork& work,
                            const Asked& asked) const;

  std::string communicator_;
};

class DeviceScatterOp : public ScatterOp {
 public:
  explicit DeviceScatterOp(tensorflow::OpKernelConstruction* construction);

  void Compute(tensorflow::OpKernelContext* context) override;

 private:
  absl::Status SumByKernels(tensorflow::OpKernelContext* context, const LocalWork& work,
                            const Asked& asked) const;
  absl::Status SumOnHost(tensorflow::OpKernelContext* context, const LocalWork& work,
                         const Asked& asked) const;

  std::string communicator_;
};

}  // namespace tfdist::tf
