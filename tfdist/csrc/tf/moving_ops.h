// The kernels of the ops that move tensors between ranks without reducing them.
#pragma once

#include "tf/collective_op.h"

namespace tfdist::tf {

class AllGatherOp : public CollectiveOp {
 public:
  explicit AllGatherOp(tensorflow::OpKernelConstruction* construction)
      : CollectiveOp(construction, Kind::kAllGather) {}

 protected:
  absl::Status Prepare(tensorflow::OpKernelContext* context, const Communicator& group,
                       Operation* operation) override;
};

class BroadcastOp : public CollectiveOp {
 public:
  explicit BroadcastOp(tensorflow::OpKernelConstruction* construction);

 protected:
  absl::Status Prepare(tensorflow::OpKernelContext* context, const Communicator& group,
                       Operation* operation) override;

 private:
  int64_t root_ = 0;
};

class SendOp : public CollectiveOp {
 public:
  explicit SendOp(tensorflow::OpKernelConstruction* construction);

 protected:
  absl::Status Prepare(tensorflow::OpKernelContext* context, const Communicator& group,
                       Operation* operation) override;

 private:
  int64_t rank_ = 0;
};

class ReceiveOp : public CollectiveOp {
 public:
  explicit ReceiveOp(tensorflow::OpKernelConstruction* construction);

 protected:
  absl::Status Prepare(tensorflow::OpKernelContext* context, const Communicator& group,
                       Operation* operation) override;

 private:
  int64_t rank_ = 0;
};

}  // namespace tfdist::tf
