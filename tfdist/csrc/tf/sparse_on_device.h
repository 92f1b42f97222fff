// The operations of `sparse_op.h` for tensors and variables in a GPU's memory. They work in TensorFlow's
// stream, since nothing here waits for another rank.
#pragma once

#include <memory>
#include <string>

#include "communicator.h"
#include "device/gpu.h"
#include "tf/sparse_op.h"

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
