// Operations that select and sum rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sparse/select.h"
#include "tensorflow/core/common_runtime/dma_helper.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_util.h"

// Returns some rows of a tensor; they share its memory if this is safe.

namespace tfdist::tf {

// A batch may use the memory of an array that a Python generator has yielded. TensorFlow knows this
// for the batch, but not for a slice, so the next operation would overwrite the array.
inline tensorflow::Tensor TakeRows(const tensorflow::Tensor& tensor, int64_t start, int64_t stop) {
  tensorflow::Tensor rows = tensor.Slice(start, stop);
  const tensorflow::TensorBuffer* buffer = tensorflow::DMAHelper::buffer(&tensor);
  const bool is_borrowed = buffer != nullptr && !buffer->OwnsMemory();
  return is_borrowed ? tensorflow::tensor::DeepCopy(rows) : rows;
}

}  // namespace tfdist::tf

// Variables that a kernel modifies in place.

namespace tfdist::tf {

// A variable that is modified, and its memory, which stays valid even if another value is assigned
// during the operation.
struct Taken {
  tensorflow::core::RefCountPtr<tensorflow::Var> variable;
  tensorflow::Tensor values;
};

// Keeps variables alive while they are modified.
using Variables = std::vector<Taken>;

// Copies bytes between the memory of tensors.
using CopyBytes = std::function<void(void* to, const void* from, size_t bytes)>;

// Takes exclusive access to the values of a float32 variable, which must have as many values as
// `like`. If others still refer to the values, the variable gets a copy. Args: input: the kernel's
// input with the variable's resource.
absl::Status TakeValues(tensorflow::OpKernelContext* context, int input,
                        const tensorflow::Tensor& like, const CopyBytes& copy, Variables* variables,
                        float** values);

}  // namespace tfdist::tf

// The kernels that convert tensors to rows of a sparse gradient, and rows to tensors. A row is an
// index and the bits of a value.

namespace tfdist::tf {

class SelectOp : public tensorflow::OpKernel {
 public:
  explicit SelectOp(tensorflow::OpKernelConstruction* construction);

  void Compute(tensorflow::OpKernelContext* context) override;

 protected:
  // The candidates of a step.
  struct Asked {
    std::vector<Candidates> candidates;  // per tensor
    std::vector<size_t> selected;        // number of values per tensor, unless there is a threshold
    Variables variables;
  };
  // The selection on the host.
  class Selected {
   public:
    Selected(const std::vector<Candidates>& candidates, const std::vector<size_t>& selected,
             float threshold);

    size_t rows() const;
    // Moves the values to `rows()` rows.
    void Take(Row* rows) const;

   private:
    const std::vector<Candidates> candidates_;
    std::vector<std::vector<uint32_t>> indices_;
  };

  absl::Status Ask(tensorflow::OpKernelContext* context, const CopyBytes& copy, Asked* asked) const;
  // Allocates the output for this many rows.
  static absl::Status Allocate(tensorflow::OpKernelContext* context, size_t count, Row** rows);
  // The threshold; 0 for none.
  float threshold() const { return threshold_; }

 private:
  int tensors_ = 0;
  int errors_ = 0;
  int momenta_ = 0;
  float threshold_ = 0;
  float factor_ = 0;
};

class ScatterOp : public tensorflow::OpKernel {
 public:
  explicit ScatterOp(tensorflow::OpKernelConstruction* construction);

  void Compute(tensorflow::OpKernelContext* context) override;

 protected:
  // The rows, and the outputs.
  struct Asked {
    const Row* rows = nullptr;
    size_t count = 0;
    std::vector<RowSums> sums;
  };
  absl::Status Ask(tensorflow::OpKernelContext* context, Asked* asked) const;

 private:
  std::vector<tensorflow::TensorShape> shapes_;
};

}  // namespace tfdist::tf
