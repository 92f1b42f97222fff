// Registers the kernels for GPU tensors as kernels for CPU tensors; gpus.py explains why.
#include "tf/moving_ops.h"
#include "tf/on_device.h"
#include "tf/reducing_ops.h"

namespace tfdist::tf {
namespace {

// Runs the kernel for GPUs if the communicator has GPUs, and otherwise the kernel for CPUs. A
// process may have communicators of both kinds.
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
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU).Priority(1), Op);
TFDIST_EITHER("TfdistAllReduce", Either<AllReduceOp>)
TFDIST_EITHER("TfdistReduceScatter", Either<ReduceScatterOp>)
TFDIST_EITHER("TfdistAllGather", Either<AllGatherOp>)
TFDIST_EITHER("TfdistAwait", Either<AwaitOp>)
TFDIST_EITHER("TfdistBroadcast", Either<BroadcastOp>)
TFDIST_EITHER("TfdistSend", Either<SendOp>)
TFDIST_EITHER("TfdistReceive", Either<ReceiveOp>)

class EitherCompressed : public DeviceCompressedAllReduceOp {
 public:
  using DeviceCompressedAllReduceOp::DeviceCompressedAllReduceOp;

 private:
  absl::Status Prepare(tensorflow::OpKernelContext* context, const Communicator& group,
                       Operation* operation) override {
    return group.gpus().empty() ? CompressedAllReduceOp::Prepare(context, group, operation)
                                : DeviceCompressedAllReduceOp::Prepare(context, group, operation);
  }
  absl::Status FindCopy(tensorflow::OpKernelContext* context, const Communicator& group,
                        CopyBytes* copy) const override {
    return group.gpus().empty() ? CompressedAllReduceOp::FindCopy(context, group, copy)
                                : DeviceCompressedAllReduceOp::FindCopy(context, group, copy);
  }
};
TFDIST_EITHER("TfdistCompressedAllReduce", EitherCompressed)

}  // namespace
}  // namespace tfdist::tf
