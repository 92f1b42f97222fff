// The kernel that tells a graph which rank of how many this process is.
#include "tf/collective_op.h"

namespace tfdist::tf {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

class GroupShapeOp : public OpKernel {
 public:
  explicit GroupShapeOp(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("communicator", &communicator_));
  }

  void Compute(OpKernelContext* context) override {
    Tensor *rank = nullptr, *size = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &rank));
    OP_REQUIRES_OK(context, context->allocate_output(1, {}, &size));
    try {
      const auto group = FindNamed(communicator_);
      rank->scalar<int32_t>()() = group->rank();
      size->scalar<int32_t>()() = group->size();
    } catch (const Error& error) {
      OP_REQUIRES_OK(context, ToStatus(error));
    }
  }

 private:
  std::string communicator_;
};

REGISTER_KERNEL_BUILDER(Name("TfdistGroupShape").Device(tensorflow::DEVICE_CPU), GroupShapeOp);

}  // namespace
}  // namespace tfdist::tf
