// Collective operations on GPUs.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "communicator.h"
#include "device/gpu.h"
#include "tf/collective_op.h"
#include "tf/sparse_op.h"

// The same kernels for tensors in a GPU's memory, of which each operation names the GPU among those
// of its communicator.

namespace tfdist::tf {

// Lets an operation wait for its GPU: what it reads has been computed, and what it writes is free,
// once this point of TensorFlow's stream has passed. Of an allocation during the operation, too.
absl::Status TakeTurn(tensorflow::OpKernelContext* context, const Communicator& group, int64_t gpu,
                      Operation* operation);

// An error where a communicator has no such GPU.
absl::Status CheckGpu(const Communicator& group, int64_t gpu);
// TensorFlow's stream for an operation; null on a CPU, where all that came before it has ended.
absl::Status FindStream(tensorflow::OpKernelContext* context, cuda::Stream** stream);

// How the memory of a GPU is copied in a stream.
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
    return TakeTurn(context, group, gpu_, operation);
  }
  void Enqueue(Communicator* group, Operation operation, Communicator::Done done) override {
    group->EnqueuePart(static_cast<size_t>(gpu_), std::move(operation), std::move(done));
  }
  int64_t gpu() const { return gpu_; }

 private:
  int64_t gpu_ = 0;
};

// TensorFlow keeps the int32 tensors of a GPU's operations in the host's memory.
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

// The operations of `sparse_op.h` for tensors and variables in a GPU's memory. They work in
// TensorFlow's stream, since nothing here waits for another rank.

namespace tfdist::tf {

// The GPU of a communicator, and TensorFlow's stream of an operation there.
struct LocalWork {
  std::shared_ptr<Communicator> group;
  cuda::Stream* stream = nullptr;

  const std::shared_ptr<const Gpu>& gpu() const { return group->gpus()[0]; }
};

// With one GPU per worker. Without kernels, the work is done on the host: the rows are the same.
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
