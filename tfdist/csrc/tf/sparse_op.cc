#include "tf/sparse_op.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "control/activity.h"
#include "error.h"
#include "tf/collective_op.h"

namespace tfdist::tf {

using tensorflow::Tensor;

absl::Status TakeValues(tensorflow::OpKernelContext* context, int input, const Tensor& like,
                        const CopyBytes& copy, Variables* variables, float** values) {
  tensorflow::core::RefCountPtr<tensorflow::Var> variable;
  TF_RETURN_IF_ERROR(
      tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, input), &variable));
  const tensorflow::mutex_lock lock(*variable->mu());
  Tensor* tensor = variable->tensor();
  if (tensor->dtype() != tensorflow::DT_FLOAT || tensor->NumElements() != like.NumElements()) {
    return absl::InvalidArgumentError(
        "A residual must be a float32 variable with as many values as its tensor. The tensor: " +
        like.shape().DebugString() + ". Received: " + tensor->DebugString() + ".");
  }
  if (!tensor->RefCountIsOne()) {
    Tensor copied;
    TF_RETURN_IF_ERROR(context->allocate_temp(tensor->dtype(), tensor->shape(), &copied));
    if (tensor->TotalBytes() > 0) { copy(copied.data(), tensor->data(), tensor->TotalBytes()); }
    *tensor = copied;
  }
  *values = static_cast<float*>(tensor->data());
  variables->push_back({std::move(variable), *tensor});
  return absl::OkStatus();
}

}  // namespace tfdist::tf

namespace tfdist::tf {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

SelectOp::SelectOp(OpKernelConstruction* construction) : OpKernel(construction) {
  OP_REQUIRES_OK(construction, construction->GetAttr("N", &tensors_));
  OP_REQUIRES_OK(construction, construction->GetAttr("E", &errors_));
  OP_REQUIRES_OK(construction, construction->GetAttr("M", &momenta_));
  OP_REQUIRES_OK(construction, construction->GetAttr("threshold", &threshold_));
  OP_REQUIRES_OK(construction, construction->GetAttr("factor", &factor_));
  const bool fits = (errors_ == 0 || errors_ == tensors_) &&
                    (momenta_ == 0 || (momenta_ == tensors_ && errors_ == tensors_));
  OP_REQUIRES(construction, fits,
              absl::InvalidArgumentError(
                  "Either all tensors must have an error or none, and momenta need errors."));
}

void SelectOp::Compute(OpKernelContext* context) {
  const SpanScope span("compression", "select");
  Asked asked;
  OP_REQUIRES_OK(context, Ask(context, std::memcpy, &asked));
  try {
    const Selected selected(asked.candidates, asked.selected, threshold_);
    Row* rows = nullptr;
    OP_REQUIRES_OK(context, Allocate(context, selected.rows(), &rows));
    selected.Take(rows);
  } catch (const Error& error) { OP_REQUIRES_OK(context, ToStatus(error)); }
}

absl::Status SelectOp::Ask(OpKernelContext* context, const CopyBytes& copy, Asked* asked) const {
  const Tensor& counts = context->input(tensors_ + errors_ + momenta_);
  const Tensor& scales = context->input(tensors_ + errors_ + momenta_ + 1);
  if (counts.NumElements() != tensors_ || scales.NumElements() != tensors_) {
    return absl::InvalidArgumentError("Each tensor needs a count and a scale.");
  }
  int64_t values = 0;
  for (int i = 0; i < tensors_; ++i) {
    const Tensor& tensor = context->input(i);
    values += tensor.NumElements();
    if (values >= int64_t{kMaxCandidates}) {
      return absl::InvalidArgumentError(
          "Tensors that are made sparse together must have fewer than 2^31 values. Received: " +
          std::to_string(values) + ".");
    }
    Candidates candidates{
        tensor.flat<float>().data(), nullptr, nullptr, static_cast<size_t>(tensor.NumElements()),
        scales.flat<float>()(i),     factor_};
    if (errors_ > 0) {
      TF_RETURN_IF_ERROR(
          TakeValues(context, tensors_ + i, tensor, copy, &asked->variables, &candidates.error));
    }
    if (momenta_ > 0) {
      TF_RETURN_IF_ERROR(TakeValues(context, tensors_ + errors_ + i, tensor, copy,
                                    &asked->variables, &candidates.momentum));
    }
    asked->candidates.push_back(candidates);
    const int64_t count = counts.flat<int64_t>()(i);
    asked->selected.push_back(count < 0 ? 0
                                        : std::min(static_cast<size_t>(count), candidates.count));
  }
  return absl::OkStatus();
}

absl::Status SelectOp::Allocate(OpKernelContext* context, size_t count, Row** rows) {
  Tensor* result = nullptr;
  TF_RETURN_IF_ERROR(
      context->allocate_output(0, TensorShape({static_cast<int64_t>(count), 2}), &result));
  *rows = static_cast<Row*>(result->data());
  return absl::OkStatus();
}

SelectOp::Selected::Selected(const std::vector<Candidates>& candidates,
                             const std::vector<size_t>& selected, float threshold)
    : candidates_(candidates) {
  for (size_t i = 0; i < candidates.size(); ++i) {
    indices_.push_back(threshold > 0 ? SelectAbove(candidates[i], threshold)
                                     : SelectLargest(candidates[i], selected[i]));
  }
}

size_t SelectOp::Selected::rows() const {
  size_t rows = 0;
  for (const std::vector<uint32_t>& indices : indices_) rows += indices.size();
  return rows;
}

void SelectOp::Selected::Take(Row* rows) const {
  int32_t first = 0;
  for (size_t i = 0; i < candidates_.size(); ++i) {
    TakeRows(candidates_[i], indices_[i], first, rows);
    first += static_cast<int32_t>(candidates_[i].count);
    rows += indices_[i].size();
  }
}

ScatterOp::ScatterOp(OpKernelConstruction* construction) : OpKernel(construction) {
  OP_REQUIRES_OK(construction, construction->GetAttr("shapes", &shapes_));
  int count = 0;
  OP_REQUIRES_OK(construction, construction->GetAttr("N", &count));
  OP_REQUIRES(construction, static_cast<size_t>(count) == shapes_.size(),
              absl::InvalidArgumentError("Each tensor needs a shape."));
}

void ScatterOp::Compute(OpKernelContext* context) {
  const SpanScope span("compression", "scatter");
  Asked asked;
  OP_REQUIRES_OK(context, Ask(context, &asked));
  try {
    SumRows(asked.rows, asked.count, asked.sums);
  } catch (const Error& error) { OP_REQUIRES_OK(context, ToStatus(error)); }
}

absl::Status ScatterOp::Ask(OpKernelContext* context, Asked* asked) const {
  const Tensor& rows = context->input(0);
  if (rows.dims() != 2 || rows.dim_size(1) != 2) {
    return absl::InvalidArgumentError(
        "A row must have an index and a value. Received: " + rows.shape().DebugString() + ".");
  }
  asked->rows = static_cast<const Row*>(rows.data());
  asked->count = static_cast<size_t>(rows.dim_size(0));
  for (size_t i = 0; i < shapes_.size(); ++i) {
    Tensor* tensor = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(static_cast<int>(i), shapes_[i], &tensor));
    asked->sums.push_back(
        {tensor->flat<float>().data(), static_cast<size_t>(tensor->NumElements())});
  }
  return absl::OkStatus();
}

namespace {

REGISTER_KERNEL_BUILDER(Name("TfdistSelect").Device(tensorflow::DEVICE_CPU), SelectOp);
REGISTER_KERNEL_BUILDER(Name("TfdistScatter").Device(tensorflow::DEVICE_CPU), ScatterOp);

}  // namespace
}  // namespace tfdist::tf
