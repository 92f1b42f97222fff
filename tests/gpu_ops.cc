// The kernels for a GPU's tensors, where the tensors are a CPU's: see gpus.py.
#include "tf/compressing_op.h"
#include "tf/reducing_op.h"

namespace tfdist::tf {
namespace {

// Of the communicators of a process, one has the GPU.
class AnyAllReduceOp : public DeviceAllReduceOp {
 public:
  using DeviceAllReduceOp::DeviceAllReduceOp;

 private:
  absl::Status Lay(tensorflow::OpKernelContext* context, const Communicator& group,
                   Operation* operation) override {
    return group.gpu() ? DeviceAllReduceOp::Lay(context, group, operation)
                       : AllReduceOp::Lay(context, group, operation);
  }
};

REGISTER_KERNEL_BUILDER(Name("TfdistAllReduce").Device(tensorflow::DEVICE_CPU).Priority(1),
                        AnyAllReduceOp);

class AnyCompressedAllReduceOp : public DeviceCompressedAllReduceOp {
 public:
  using DeviceCompressedAllReduceOp::DeviceCompressedAllReduceOp;

 private:
  absl::Status Prepare(tensorflow::OpKernelContext* context, const Communicator& group,
                       Operation* operation) override {
    return group.gpu() ? DeviceCompressedAllReduceOp::Prepare(context, group, operation)
                       : CompressedAllReduceOp::Prepare(context, group, operation);
  }
  absl::Status FindCopy(tensorflow::OpKernelContext* context, const Communicator& group,
                        CopyBytes* copy) const override {
    return group.gpu() ? DeviceCompressedAllReduceOp::FindCopy(context, group, copy)
                       : CompressedAllReduceOp::FindCopy(context, group, copy);
  }
};

REGISTER_KERNEL_BUILDER(
    Name("TfdistCompressedAllReduce").Device(tensorflow::DEVICE_CPU).Priority(1),
    AnyCompressedAllReduceOp);

}  // namespace
}  // namespace tfdist::tf
