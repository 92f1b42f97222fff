// The kernels that make rows of a sparse gradient from tensors, and tensors from rows.
//
// A row is an index, among the values of all tensors one after the other, and a value's bits.
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "control/spans.h"
#include "sparse/select.h"
#include "tf/collective_op.h"
#include "tf/variables.h"

namespace tfdist::tf {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

struct Row {
  int32_t index;
  float value;
};
static_assert(sizeof(Row) == 2 * sizeof(int32_t));

absl::Status TooMany(int64_t values) {
  return absl::InvalidArgumentError(
      "Tensors that are made sparse together have fewer than 2^31 values. Received: " +
      std::to_string(values) + ".");
}

class SelectOp : public OpKernel {
 public:
  explicit SelectOp(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("N", &tensors_));
    OP_REQUIRES_OK(construction, construction->GetAttr("E", &errors_));
    OP_REQUIRES_OK(construction, construction->GetAttr("M", &momenta_));
    OP_REQUIRES_OK(construction, construction->GetAttr("threshold", &threshold_));
    OP_REQUIRES_OK(construction, construction->GetAttr("factor", &factor_));
    const bool fits = (errors_ == 0 || errors_ == tensors_) &&
                      (momenta_ == 0 || (momenta_ == tensors_ && errors_ == tensors_));
    OP_REQUIRES(construction, fits,
                absl::InvalidArgumentError("Each tensor has an error, or none has; and momenta "
                                           "need errors."));
  }

  void Compute(OpKernelContext* context) override {
    const SpanScope span("compression", "select");
    const Tensor& counts = context->input(tensors_ + errors_ + momenta_);
    const Tensor& scales = context->input(tensors_ + errors_ + momenta_ + 1);
    OP_REQUIRES(context, counts.NumElements() == tensors_ && scales.NumElements() == tensors_,
                absl::InvalidArgumentError("Each tensor has a count and a scale."));
    std::vector<Candidates> all;
    std::vector<std::vector<uint32_t>> selected;
    Variables variables;
    int64_t first = 0, count = 0;
    for (int i = 0; i < tensors_; ++i) {
      const Tensor& tensor = context->input(i);
      OP_REQUIRES(context, first + tensor.NumElements() < int64_t{kMostCandidates},
                  TooMany(first + tensor.NumElements()));
      Candidates candidates{tensor.flat<float>().data(), nullptr, nullptr,
                            static_cast<size_t>(tensor.NumElements()), scales.flat<float>()(i),
                            factor_};
      if (errors_ > 0) {
        OP_REQUIRES_OK(context, TakeValues(context, tensors_ + i, tensor, std::memcpy, &variables,
                                           &candidates.error));
      }
      if (momenta_ > 0) {
        OP_REQUIRES_OK(context, TakeValues(context, tensors_ + errors_ + i, tensor, std::memcpy,
                                           &variables, &candidates.momentum));
      }
      try {
        selected.push_back(Select(candidates, counts.flat<int64_t>()(i)));
      } catch (const Error& error) {
        OP_REQUIRES_OK(context, ToStatus(error));
      }
      all.push_back(candidates);
      first += tensor.NumElements();
      count += static_cast<int64_t>(selected.back().size());
    }
    Tensor* result = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({count, 2}), &result));
    auto* rows = static_cast<Row*>(result->data());
    first = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      Take(all[i], selected[i], static_cast<int32_t>(first), rows);
      first += static_cast<int64_t>(all[i].count);
      rows += selected[i].size();
    }
  }

 private:
  std::vector<uint32_t> Select(const Candidates& candidates, int64_t count) const {
    return threshold_ > 0 ? SelectAbove(candidates, threshold_)
                          : SelectLargest(candidates, count < 0 ? 0 : static_cast<size_t>(count));
  }

  // Moves the selected values to `rows`: what is sent is no longer kept.
  static void Take(const Candidates& candidates, const std::vector<uint32_t>& indices,
                   int32_t first, Row* rows) {
    bool finite = true;
    for (const uint32_t index : indices) {
      const float value = candidates.Value(index);
      *rows++ = {first + static_cast<int32_t>(index), value};
      finite = finite && std::isfinite(value);
      if (candidates.error) candidates.error[index] = 0;
      if (candidates.momentum) candidates.momentum[index] = 0;
    }
    // What is not finite has shown, for it is selected first; no step after this one needs more.
    if (!finite && candidates.error) Forget(candidates.error, candidates.count);
    if (!finite && candidates.momentum) Forget(candidates.momentum, candidates.count);
  }

  static void Forget(float* values, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      if (!std::isfinite(values[i])) values[i] = 0;
    }
  }

  int tensors_ = 0;
  int errors_ = 0;
  int momenta_ = 0;
  float threshold_ = 0;
  float factor_ = 0;
};

class ScatterOp : public OpKernel {
 public:
  explicit ScatterOp(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("shapes", &shapes_));
    int count = 0;
    OP_REQUIRES_OK(construction, construction->GetAttr("N", &count));
    OP_REQUIRES(construction, static_cast<size_t>(count) == shapes_.size(),
                absl::InvalidArgumentError("Each tensor has a shape."));
  }

  void Compute(OpKernelContext* context) override {
    const SpanScope span("compression", "scatter");
    const Tensor& input = context->input(0);
    OP_REQUIRES(context, input.dims() == 2 && input.dim_size(1) == 2,
                absl::InvalidArgumentError("Rows have an index and a value. Received: " +
                                           input.shape().DebugString() + "."));
    std::vector<float*> values;
    std::vector<int64_t> ends;
    int64_t end = 0;
    for (size_t i = 0; i < shapes_.size(); ++i) {
      Tensor* tensor = nullptr;
      OP_REQUIRES_OK(context, context->allocate_output(static_cast<int>(i), shapes_[i], &tensor));
      if (tensor->TotalBytes() > 0) std::memset(tensor->data(), 0, tensor->TotalBytes());
      values.push_back(tensor->flat<float>().data());
      ends.push_back(end += tensor->NumElements());
    }
    const auto* rows = static_cast<const Row*>(input.data());
    // Rows of one rank rise, so the tensor of one is mostly that of the one before.
    size_t at = 0;
    for (int64_t r = 0; r < input.dim_size(0); ++r) {
      const int64_t index = rows[r].index;
      OP_REQUIRES(context, index >= 0 && index < end,
                  absl::InvalidArgumentError("A sparse gradient has a value at index " +
                                             std::to_string(index) + " of " +
                                             std::to_string(end) + "."));
      const auto begin = [&] { return at == 0 ? 0 : ends[at - 1]; };
      while (index >= ends[at]) ++at;
      while (index < begin()) --at;
      values[at][index - begin()] += rows[r].value;
    }
  }

 private:
  std::vector<TensorShape> shapes_;
};

REGISTER_KERNEL_BUILDER(Name("TfdistSelect").Device(tensorflow::DEVICE_CPU), SelectOp);
REGISTER_KERNEL_BUILDER(Name("TfdistScatter").Device(tensorflow::DEVICE_CPU), ScatterOp);

}  // namespace
}  // namespace tfdist::tf
