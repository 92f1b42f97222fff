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
    const auto small = [&](const char* name, uint8_t* value) {
      int64_t given = 0;
      OP_REQUIRES_OK(construction, construction->GetAttr(name, &given));
      // What does not fit becomes what no codec has.
      *value = static_cast<uint8_t>(given & ~int64_t{255} ? 255 : given);
    };
    uint8_t form = 0;
    int64_t block = 0;
    small("form", &form);
    small("bits", &codec_.bits);
    OP_REQUIRES_OK(construction, construction->GetAttr("stochastic", &codec_.stochastic));
    OP_REQUIRES_OK(construction, construction->GetAttr("euclidean", &codec_.euclidean));
    OP_REQUIRES_OK(construction, construction->GetAttr("unit", &codec_.unit));
    OP_REQUIRES_OK(construction, construction->GetAttr("clip", &codec_.clip));
    OP_REQUIRES_OK(construction, construction->GetAttr("block", &block));
    OP_REQUIRES_OK(construction, construction->GetAttr("within_hosts", &within_hosts_));
    OP_REQUIRES_OK(construction, construction->GetAttr("N", &tensors_));
    OP_REQUIRES_OK(construction, construction->GetAttr("M", &errors_));
    codec_.form = static_cast<Form>(form);
    codec_.block = static_cast<uint32_t>(block);
    try {
      CheckCodec(codec_);
    } catch (const Error& error) {
      construction->SetStatus(ToStatus(error));
    }
  }

 private:
  absl::Status Prepare(OpKernelContext* context, const Communicator&,
                       Operation* operation) override {
    std::vector<BasicPiece<const char>> in;
    std::vector<BasicPiece<char>> out;
    for (int i = 1; i <= tensors_; ++i) {
      const Tensor& tensor = context->input(i);
      Tensor* result = nullptr;
      TF_RETURN_IF_ERROR(
          context->forward_input_or_allocate_output({i}, i - 1, tensor.shape(), &result));
      in.push_back({static_cast<const char*>(tensor.data()), tensor.TotalBytes()});
      out.push_back({static_cast<char*>(result->data()), result->TotalBytes()});
      operation->fingerprint.AddShape(Dims(tensor.shape()));
    }
    operation->in = ConstPieces(in);
    operation->out = Pieces(out);
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
