// The kernels that tell the recorder how far a step has come. They do nothing else.
#include "control/activity.h"
#include "control/spans.h"
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
    if (!key.empty()) name_ = HashOf(fingerprint);
  }

  void Compute(OpKernelContext*) override {
    try {
      Recorder& recorder = FindNamed(communicator_)->recorder();
      if (name_) {
        recorder.Ready(name_, stalls_);
      } else {
        recorder.Stalls();
      }
    } catch (const Error&) {
      // It has been closed, as its operation will say.
    }
  }

 private:
  std::string communicator_;
  uint64_t name_ = 0;
  bool stalls_ = false;
};

class InputBeginsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext*) override { Activity::Instance().InputBegins(); }
};

class InputEndsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext*) override { Activity::Instance().InputEnds(); }
};

// The beginning of a span, or its end, which takes the time that the beginning gave out.
class SpanBeginsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* context) override {
    tensorflow::Tensor* begin = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &begin));
    begin->scalar<int64_t>()() = Spans::Instance().recording() ? Nanoseconds() : 0;
  }
};

class SpanEndsOp : public OpKernel {
 public:
  explicit SpanEndsOp(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("lane", &lane_));
    OP_REQUIRES_OK(construction, construction->GetAttr("span", &name_));
  }

  void Compute(OpKernelContext* context) override {
    const tensorflow::Tensor& given = context->input(1);
    const int64_t begin = given.NumElements() == 1 ? *given.flat<int64_t>().data() : 0;
    if (begin) Spans::Instance().Add(lane_.c_str(), name_.c_str(), begin, Nanoseconds());
  }

 private:
  std::string lane_;
  std::string name_;
};

REGISTER_KERNEL_BUILDER(Name("TfdistReady").Device(tensorflow::DEVICE_CPU), ReadyOp);
REGISTER_KERNEL_BUILDER(Name("TfdistSpanBegins").Device(tensorflow::DEVICE_CPU), SpanBeginsOp);
REGISTER_KERNEL_BUILDER(Name("TfdistSpanEnds").Device(tensorflow::DEVICE_CPU), SpanEndsOp);
REGISTER_KERNEL_BUILDER(Name("TfdistInputBegins").Device(tensorflow::DEVICE_CPU), InputBeginsOp);
REGISTER_KERNEL_BUILDER(Name("TfdistInputEnds").Device(tensorflow::DEVICE_CPU), InputEndsOp);

}  // namespace
}  // namespace tfdist::tf
