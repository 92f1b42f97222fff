// The kernels for a GPU's tensors, where the tensors are a CPU's: see gpus.py.
#include "tf/compressing_op.h"
#include "tf/moving_op.h"
#include "tf/on_device.h"
#include "tf/reducing_op.h"
#include "tf/sparse_on_device.h"

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

// What works in TensorFlow's stream; a CPU's operations have none to wait for each other in.
template <typename Op, typename OnDevice>
class EitherLocal : public OnDevice {
 public:
  using OnDevice::OnDevice;

  void Compute(tensorflow::OpKernelContext* context) override {
    const std::string& name = this->communicator();
    const auto group = name.empty() ? nullptr : FindNamed(name);
    if (!group || group->gpus().empty()) return Op::Compute(context);
    OnDevice::Compute(context);
    cuda::Check(cuda::Load().cuStreamSynchronize(nullptr), "cuStreamSynchronize");
  }
};
using EitherSelect = EitherLocal<SelectOp, DeviceSelectOp>;
using EitherScatter = EitherLocal<ScatterOp, DeviceScatterOp>;
TFDIST_EITHER("TfdistSelect", EitherSelect)
TFDIST_EITHER("TfdistScatter", EitherScatter)

}  // namespace
}  // namespace tfdist::tf
