// The kernel of the all-reduce that sends encoded values.
#include <cstring>
#include <memory>

#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tf/collective_op.h"

namespace tfdist::tf {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::Var;

using Variables = std::vector<tensorflow::core::RefCountPtr<Var>>;

class CompressedAllReduceOp : public CollectiveOp {
 public:
  explicit CompressedAllReduceOp(OpKernelConstruction* construction)
      : CollectiveOp(construction, Kind::kAllReduce) {
    int64_t form = 0, bits = 0, block = 0;
    bool stochastic = false, euclidean = false, unit = false;
    float clip = 0;
    OP_REQUIRES_OK(construction, construction->GetAttr("form", &form));
    OP_REQUIRES_OK(construction, construction->GetAttr("bits", &bits));
    OP_REQUIRES_OK(construction, construction->GetAttr("stochastic", &stochastic));
    OP_REQUIRES_OK(construction, construction->GetAttr("euclidean", &euclidean));
    OP_REQUIRES_OK(construction, construction->GetAttr("unit", &unit));
    OP_REQUIRES_OK(construction, construction->GetAttr("clip", &clip));
    OP_REQUIRES_OK(construction, construction->GetAttr("block", &block));
    OP_REQUIRES_OK(construction, construction->GetAttr("within_hosts", &within_hosts_));
    OP_REQUIRES_OK(construction, construction->GetAttr("N", &tensors_));
    OP_REQUIRES_OK(construction, construction->GetAttr("M", &errors_));
    try {
      codec_ = MakeCodec(form, bits, stochastic, euclidean, unit, clip, block);
    } catch (const Error& error) {
      construction->SetStatus(ToStatus(error));
    }
  }

 private:
  absl::Status Prepare(OpKernelContext* context, const Communicator&,
                       Operation* operation) override {
    TF_RETURN_IF_ERROR(LayList(context, tensors_, operation));
    Compression compression;
    compression.codec = codec_;
    compression.within_hosts = within_hosts_;
    const int64_t seed = context->input(tensors_ + errors_ + 1).scalar<int64_t>()();
    compression.seed = static_cast<uint32_t>(seed ^ (seed >> 32));
    if (errors_ > 0) {
      auto variables = std::make_shared<Variables>();
      TF_RETURN_IF_ERROR(FindErrors(context, variables.get(), &compression.error));
      operation->kept = std::move(variables);
    }
    operation->compression = std::move(compression);
    return absl::OkStatus();
  }

  absl::Status FindErrors(OpKernelContext* context, Variables* variables, Pieces* error) const {
    std::vector<BasicPiece<char>> pieces;
    for (int i = 0; i < errors_; ++i) {
      tensorflow::core::RefCountPtr<Var> variable;
      TF_RETURN_IF_ERROR(tensorflow::LookupResource(
          context, tensorflow::HandleFromInput(context, tensors_ + 1 + i), &variable));
      const tensorflow::mutex_lock lock(*variable->mu());
      Tensor* tensor = variable->tensor();
      const Tensor& values = context->input(1 + i);
      if (tensor->dtype() != tensorflow::DT_FLOAT || tensor->shape() != values.shape()) {
        return absl::InvalidArgumentError(
            "The error of a tensor is a float32 variable of its shape, " +
            values.shape().DebugString() + ". Received: " + tensor->DebugString() + ".");
      }
      if (!tensor->RefCountIsOne()) {
        // Somebody still reads what was there.
        Tensor copy;
        TF_RETURN_IF_ERROR(context->allocate_temp(tensor->dtype(), tensor->shape(), &copy));
        if (tensor->TotalBytes() > 0) {
          std::memcpy(copy.data(), tensor->data(), tensor->TotalBytes());
        }
        *tensor = copy;
      }
      pieces.push_back({static_cast<char*>(tensor->data()), tensor->TotalBytes()});
      variables->push_back(std::move(variable));
    }
    *error = Pieces(pieces);
    return absl::OkStatus();
  }

  Codec codec_;
  bool within_hosts_ = false;
  int tensors_ = 0;
  int errors_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("TfdistCompressedAllReduce").Device(tensorflow::DEVICE_CPU),
                        CompressedAllReduceOp);

}  // namespace
}  // namespace tfdist::tf
