#include "tf/variables.h"

#include <utility>

namespace tfdist::tf {

using tensorflow::Tensor;

absl::Status TakeValues(tensorflow::OpKernelContext* context, int input, const Tensor& like,
                        const CopyBytes& copy, Variables* variables, float** values) {
  tensorflow::core::RefCountPtr<tensorflow::Var> variable;
  TF_RETURN_IF_ERROR(tensorflow::LookupResource(
      context, tensorflow::HandleFromInput(context, input), &variable));
  const tensorflow::mutex_lock lock(*variable->mu());
  Tensor* tensor = variable->tensor();
  if (tensor->dtype() != tensorflow::DT_FLOAT || tensor->NumElements() != like.NumElements()) {
    return absl::InvalidArgumentError(
        "What is kept of a tensor is a float32 variable with as many values. The tensor: " +
        like.shape().DebugString() + ". Received: " + tensor->DebugString() + ".");
  }
  if (!tensor->RefCountIsOne()) {
    Tensor copied;
    TF_RETURN_IF_ERROR(context->allocate_temp(tensor->dtype(), tensor->shape(), &copied));
    if (tensor->TotalBytes() > 0) {
      copy(copied.data(), tensor->data(), tensor->TotalBytes());
    }
    *tensor = copied;
  }
  *values = static_cast<float*>(tensor->data());
  variables->push_back({std::move(variable), *tensor});
  return absl::OkStatus();
}

}  // namespace tfdist::tf
