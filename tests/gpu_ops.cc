// The kernels for a GPU's tensors, where the tensors are a CPU's: see gpus.py.
#include "tf/moving_op.h"
#include "tf/on_device.h"
#include "tf/reducing_op.h"

namespace tfdist::tf {
namespace {

// Of the communicators of a process, some have GPUs.
template <typename Op>
class Either : public OnDevice<Op> {
 public:
  using OnDevice<Op>::OnDevice;

 private:
  absl::Status Prepare(tensorflow::OpKernelContext* context, const Communicator& group,
                       Operation* operation) override {
    return group.gpus().empty() ? Op::Prepare(context, group, operation)
                                : OnDevice<Op>::Prepare(context, group, operation);
  }
};

#define TFDIST_EITHER(name, Op) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU).Priority(1), Either<Op>);
TFDIST_EITHER("TfdistAllReduce", AllReduceOp)
TFDIST_EITHER("TfdistReduceScatter", ReduceScatterOp)
TFDIST_EITHER("TfdistAllGather", AllGatherOp)
TFDIST_EITHER("TfdistAwait", AwaitOp)
TFDIST_EITHER("TfdistBroadcast", BroadcastOp)
TFDIST_EITHER("TfdistSend", SendOp)
TFDIST_EITHER("TfdistReceive", ReceiveOp)

}  // namespace
}  // namespace tfdist::tf
