// The kernel for a GPU's tensors, where the tensors are a CPU's: see gpus.py.
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

}  // namespace
}  // namespace tfdist::tf
