// What the kernels of all_reduce and reduce_scatter share, and the first of them.
#pragma once

#include "tf/collective_op.h"

namespace tfdist::tf {

class ReducingOp : public CollectiveOp {
 public:
  ReducingOp(tensorflow::OpKernelConstruction* construction, Kind kind);

 protected:
  absl::Status Prepare(tensorflow::OpKernelContext* context, const Communicator& group,
                       Operation* operation) override;
  virtual absl::Status Lay(tensorflow::OpKernelContext* context, const Communicator& group,
                           Operation* operation) = 0;

 private:
  ReduceOp op_ = ReduceOp::kSum;
};

class AllReduceOp : public ReducingOp {
 public:
  explicit AllReduceOp(tensorflow::OpKernelConstruction* construction);

 protected:
  absl::Status Lay(tensorflow::OpKernelContext* context, const Communicator& group,
                   Operation* operation) override;
};

// The same of tensors in a GPU's memory.
class DeviceAllReduceOp : public AllReduceOp {
 public:
  using AllReduceOp::AllReduceOp;

 protected:
  absl::Status Lay(tensorflow::OpKernelContext* context, const Communicator& group,
                   Operation* operation) override;
};

}  // namespace tfdist::tf
