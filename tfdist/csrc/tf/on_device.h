// Collective operations on GPUs.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "communicator.h"
#include "device/gpu.h"
#include "tf/collective_op.h"
#include "tf/sparse_op.h"

// The kernels of collectives for tensors in GPU memory. Each operation has an attribute that
// selects one of its communicator's GPUs.

namespace tfdist::tf {

// Makes an operation wait for the present point of TensorFlow's stream on its GPU. Once the stream
// has passed this point, the inputs are computed and the outputs may be written. This also holds
// for memory allocated during the operation.
absl::Status FollowStream(tensorflow::OpKernelContext* context, const Communicator& group,
                          int64_t gpu, Operation* operation);

// Returns an error if a communicator has no such GPU.
absl::Status CheckGpu(const Communicator& group, int64_t gpu);
// Finds TensorFlow's stream for an operation; null on a CPU, where all earlier work has finished.
absl::Status FindStream(tensorflow::OpKernelContext* context, cuda::Stream** stream);

// Returns a function that copies GPU memory in a stream.
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

// TensorFlow keeps int32 tensors of GPU operations in host memory.
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

// The operations of `sparse_op.h` for tensors and variables in GPU memory. They run in TensorFlow's
// stream, since they wait for no other rank.

namespace tfdist::tf {

// The GPU of a communicator, and TensorFlow's stream for an operation on it.
struct LocalWork {
  std::shared_ptr<Communicator> group;
  cuda::Stream* stream = nullptr;

  const std::shared_ptr<const Gpu>& gpu() const { return group->gpus()[0]; }
};

// Supports one GPU per worker. Without kernels, the host does the work and selects the same rows.
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
