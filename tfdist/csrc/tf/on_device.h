// The kernels of tfdist's ops for tensors in GPU memory.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "communicator.h"
#include "device/gpu.h"
#include "tf/collective_op.h"
#include "tf/sparse_op.h"

// The kernels of collectives. The attribute `gpu` of an op is the index of a GPU in the op's
// communicator.

namespace tfdist::tf {

// Makes an operation wait until TensorFlow's stream on the GPU has finished all work that is queued
// in the stream now. By then, the inputs have been computed, and earlier work no longer uses the
// memory of the outputs. If the operation allocates memory later, the operation waits for the
// stream once more before it uses this memory.
absl::Status FollowStream(tensorflow::OpKernelContext* context, const Communicator& group,
                          int64_t gpu, Operation* operation);

// Returns an error unless the communicator has a GPU with this index.
absl::Status CheckGpu(const Communicator& group, int64_t gpu);
// Sets `*stream` to the stream in which TensorFlow runs this op. If the op runs on a CPU, `*stream`
// remains null, because all earlier work has already finished.
absl::Status FindStream(tensorflow::OpKernelContext* context, cuda::Stream** stream);

// Returns a function that copies bytes to or from the memory of a GPU, by queuing the copy in a
// stream.
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

// The types of tensors that are in GPU memory if an op runs on a GPU. int32 is missing, because
// TensorFlow keeps int32 tensors in host memory.
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

// The kernels of `sparse_op.h` for tensors and variables in GPU memory. These kernels do not wait
// for other ranks, so their work is queued directly in TensorFlow's stream.

namespace tfdist::tf {

// A communicator with one GPU, and the stream in which TensorFlow runs an op on this GPU.
struct LocalWork {
  std::shared_ptr<Communicator> group;
  cuda::Stream* stream = nullptr;

  const std::shared_ptr<const Gpu>& gpu() const { return group->gpus()[0]; }
};

// Selects values in GPU memory. Supports only one GPU per worker. If the core has no CUDA kernels
// for the GPU, the values are copied to the host, which selects the same rows.
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
