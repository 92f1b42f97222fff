// The kernels of all_reduce and reduce_scatter.
#pragma once

#include "tf/collective_op.h"

namespace tfdist::tf {

class ReducingOp : public CollectiveOp {
 public:
  ReducingOp(tensorflow::OpKernelConstruction* construction, Kind kind);

 protected:
  absl::Status Prepare(tensorflow::OpKernelContext* context, const Communicator& group,
                       Operation* operation) override;

 private:
  virtual absl::Status Lay(tensorflow::OpKernelContext* context, const Communicator& group,
                           Operation* operation) = 0;

  ReduceOp op_ = ReduceOp::kSum;
};

class AllReduceOp : public ReducingOp {
 public:
  explicit AllReduceOp(tensorflow::OpKernelConstruction* construction);

 private:
  absl::Status Lay(tensorflow::OpKernelContext* context, const Communicator& group,
                   Operation* operation) override;

  bool awaited_ = false;  // by another operation, which has the result
};

// Hands on what all-reduces before it have only launched, once it is there.
class AwaitOp : public CollectiveOp {
 public:
  explicit AwaitOp(tensorflow::OpKernelConstruction* construction)
      : CollectiveOp(construction, Kind::kAllReduce) {}

 protected:
  absl::Status Prepare(tensorflow::OpKernelContext* context, const Communicator& group,
                       Operation* operation) override;
};

class ReduceScatterOp : public ReducingOp {
 public:
  explicit ReduceScatterOp(tensorflow::OpKernelConstruction* construction)
      : ReducingOp(construction, Kind::kReduceScatter) {}

 private:
  absl::Status Lay(tensorflow::OpKernelContext* context, const Communicator& group,
                   Operation* operation) override;
};

}  // namespace tfdist::tf
