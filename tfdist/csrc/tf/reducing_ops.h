// The kernels of the ops that reduce tensors over ranks, with and without compression.
#pragma once

#include "tf/collective_op.h"
#include "tf/on_device.h"
#include "tf/sparse_op.h"

// The kernels of all_reduce and reduce_scatter.

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

  // Whether a TfdistAwait op waits for the result, so that this op only has to launch the
  // operation.
  bool awaited_ = false;
};

// Waits until launched all-reduces have finished, and returns their results.
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

// The compressed all-reduce.

namespace tfdist::tf {

class CompressedAllReduceOp : public CollectiveOp {
 public:
  explicit CompressedAllReduceOp(tensorflow::OpKernelConstruction* construction);

 protected:
  absl::Status Prepare(tensorflow::OpKernelContext* context, const Communicator& group,
                       Operation* operation) override;
  // Sets `*copy` to a function that can copy the values of the residual variables.
  virtual absl::Status FindCopy(tensorflow::OpKernelContext* context, const Communicator& group,
                                CopyBytes* copy) const;

 private:
  absl::Status FindErrors(tensorflow::OpKernelContext* context, const CopyBytes& copy,
                          Variables* variables, BufferList* error) const;

  Codec codec_;
  bool within_hosts_ = false;
  // Whether a TfdistAwait op waits for the result, so that this op only has to launch the
  // operation.
  bool awaited_ = false;
  int tensors_ = 0;
  int errors_ = 0;
};

// The compressed all-reduce for tensors and variables in GPU memory.
class DeviceCompressedAllReduceOp : public OnDevice<CompressedAllReduceOp> {
 public:
  using OnDevice<CompressedAllReduceOp>::OnDevice;

 protected:
  absl::Status FindCopy(tensorflow::OpKernelContext* context, const Communicator& group,
                        CopyBytes* copy) const override;
};

}  // namespace tfdist::tf
