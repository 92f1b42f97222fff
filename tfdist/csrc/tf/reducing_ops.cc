// The kernels of all_reduce and reduce_scatter.
#include "tf/reducing_op.h"

#include "reduce/reduce.h"

namespace tfdist::tf {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

ReducingOp::ReducingOp(OpKernelConstruction* construction, Kind kind)
    : CollectiveOp(construction, kind) {
  std::string name;
  OP_REQUIRES_OK(construction, construction->GetAttr("op", &name));
  op_ = ReductionNamed(name);
}

absl::Status ReducingOp::Prepare(OpKernelContext* context, const Communicator& group,
                                 Operation* operation) {
  CheckReducible(operation->fingerprint.type, op_);
  operation->fingerprint.op = op_;
  return Lay(context, group, operation);
}

AllReduceOp::AllReduceOp(OpKernelConstruction* construction)
    : ReducingOp(construction, Kind::kAllReduce) {}

absl::Status AllReduceOp::Lay(OpKernelContext* context, const Communicator&,
                              Operation* operation) {
  return LayList(context, context->num_inputs() - 1, operation);
}

namespace {

class ReduceScatterOp : public ReducingOp {
 public:
  explicit ReduceScatterOp(OpKernelConstruction* construction)
      : ReducingOp(construction, Kind::kReduceScatter) {}

 private:
  absl::Status Lay(OpKernelContext* context, const Communicator& group,
                   Operation* operation) override {
    const Tensor& tensor = context->input(1);
    if (tensor.dims() == 0 || tensor.dim_size(0) % group.size() != 0) {
      return absl::InvalidArgumentError(
          "reduce_scatter cuts the first axis into " + std::to_string(group.size()) +
          " equal parts. Received: shape " + tensor.shape().DebugString() +
          ". Pad it to a multiple of the number of ranks.");
    }
    TensorShape part = tensor.shape();
    part.set_dim(0, tensor.dim_size(0) / group.size());
    Tensor* result = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(0, part, &result));
    operation->in = Read(tensor);
    operation->out = Written(result);
    operation->fingerprint.AddShape(Dims(tensor.shape()));
    return absl::OkStatus();
  }
};

#define TFDIST_KERNEL(name, kernel)                                                       \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), kernel);

TFDIST_KERNEL("TfdistAllReduce", AllReduceOp)
TFDIST_KERNEL("TfdistReduceScatter", ReduceScatterOp)
// On a GPU's worker the tensors are brought to the host's memory and back.
REGISTER_KERNEL_BUILDER(Name("TfdistReduceScatter")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("token")
                            .HostMemory("tensor")
                            .HostMemory("part"),
                        ReduceScatterOp);

}  // namespace
}  // namespace tfdist::tf
