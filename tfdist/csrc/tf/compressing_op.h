// The all-reduce that sends encoded values.
#pragma once

#include "tf/on_device.h"
#include "tf/variables.h"

namespace tfdist::tf {

class CompressedAllReduceOp : public CollectiveOp {
 public:
  explicit CompressedAllReduceOp(tensorflow::OpKernelConstruction* construction);

 protected:
  absl::Status Prepare(tensorflow::OpKernelContext* context, const Communicator& group,
                       Operation* operation) override;
  // How the memory of variables is copied.
  virtual absl::Status FindCopy(tensorflow::OpKernelContext* context, const Communicator& group,
                                CopyBytes* copy) const;

 private:
  absl::Status FindErrors(tensorflow::OpKernelContext* context, const CopyBytes& copy,
                          Variables* variables, Pieces* error) const;

  Codec codec_;
  bool within_hosts_ = false;
  bool awaited_ = false;  // by another operation, which has the result
  int tensors_ = 0;
  int errors_ = 0;
};

// The same of tensors and variables in a GPU's memory.
class DeviceCompressedAllReduceOp : public OnDevice<CompressedAllReduceOp> {
 public:
  using OnDevice<CompressedAllReduceOp>::OnDevice;

 protected:
  absl::Status FindCopy(tensorflow::OpKernelContext* context, const Communicator& group,
                        CopyBytes* copy) const override;
};

}  // namespace tfdist::tf
