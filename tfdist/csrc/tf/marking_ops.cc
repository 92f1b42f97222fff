// The kernels that tell the recorder how far a step has come. They do nothing else.
#include "control/activity.h"
#include "tf/collective_op.h"

namespace tfdist::tf {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

class ReadyOp : public OpKernel {
 public:
  explicit ReadyOp(OpKernelConstruction* construction) : OpKernel(construction) {
    std::string key;
    OP_REQUIRES_OK(construction, construction->GetAttr("communicator", &communicator_));
    OP_REQUIRES_OK(construction, construction->GetAttr("key", &key));
    OP_REQUIRES_OK(construction, construction->GetAttr("stalls", &stalls_));
    Fingerprint fingerprint;
    fingerprint.SetName(key);
    name_ = HashOf(fingerprint);
  }

  void Compute(OpKernelContext*) override {
    try {
      FindNamed(communicator_)->recorder().Ready(name_, stalls_);
    } catch (const Error&) {
      // It has been closed, as its operation will say.
    }
  }

 private:
  std::string communicator_;
  uint64_t name_ = 0;
  bool stalls_ = false;
};

class InputOp : public OpKernel {
 public:
  explicit InputOp(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("begins", &begins_));
  }

  void Compute(OpKernelContext*) override {
    if (begins_) {
      Activity::Instance().InputBegins();
    } else {
      Activity::Instance().InputEnds();
    }
  }

 private:
  bool begins_ = false;
};

REGISTER_KERNEL_BUILDER(Name("TfdistReady").Device(tensorflow::DEVICE_CPU), ReadyOp);
REGISTER_KERNEL_BUILDER(Name("TfdistInput").Device(tensorflow::DEVICE_CPU), InputOp);

}  // namespace
}  // namespace tfdist::tf
