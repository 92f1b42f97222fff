// Ops that select the rows of a sparse gradient, and ops that sum rows.
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

namespace tfdist::tf {

// Returns the rows [start, stop) of a tensor. They share the memory of the tensor if this is safe.
//
// It is not safe if the tensor uses the memory of an array that a Python generator has yielded.
// TensorFlow knows that it must not overwrite the memory of such a tensor, but it does not know
// this for a slice of the tensor.
inline tensorflow::Tensor TakeRows(const tensorflow::Tensor& tensor, int64_t start, int64_t stop) {
  tensorflow::Tensor rows = tensor.Slice(start, stop);
  const tensorflow::TensorBuffer* buffer = tensorflow::DMAHelper::buffer(&tensor);
  const bool is_borrowed = buffer != nullptr && !buffer->OwnsMemory();
  return is_borrowed ? tensorflow::tensor::DeepCopy(rows) : rows;
}

}  // namespace tfdist::tf

// Variables that a kernel modifies in place.

namespace tfdist::tf {

// A variable that a kernel modifies, and its memory. The memory stays valid even if another value
// is assigned to the variable meanwhile.
struct Taken {
  tensorflow::core::RefCountPtr<tensorflow::Var> variable;
  tensorflow::Tensor values;
};

// The variables that a kernel modifies. The list keeps them alive.
using Variables = std::vector<Taken>;

// Copies bytes between the memory of tensors.
using CopyBytes = std::function<void(void* to, const void* from, size_t bytes)>;

// Takes exclusive access to the values of a float32 variable, which must have as many values as
// `like`. If other tensors share these values, the variable gets its own copy of the values.
// Args: input: the index of the kernel's input with the variable's resource.
absl::Status TakeValues(tensorflow::OpKernelContext* context, int input,
                        const tensorflow::Tensor& like, const CopyBytes& copy, Variables* variables,
                        float** values);

}  // namespace tfdist::tf

// The kernels that select values of tensors as rows of a sparse gradient, and the kernels that sum
// rows into tensors. A row consists of an index and the bits of a value.

namespace tfdist::tf {

class SelectOp : public tensorflow::OpKernel {
 public:
  explicit SelectOp(tensorflow::OpKernelConstruction* construction);

  void Compute(tensorflow::OpKernelContext* context) override;

 protected:
  // The inputs of one call of the kernel.
  struct Asked {
    std::vector<Candidates> candidates;  // one for each tensor
    // The number of values to select from each tensor, if there is no threshold.
    std::vector<size_t> selected;
    Variables variables;
  };
  // The result of a selection on the host.
  class Selected {
   public:
    Selected(const std::vector<Candidates>& candidates, const std::vector<size_t>& selected,
             float threshold);

    size_t rows() const;
    // Moves the selected values to `rows`, which has room for `rows()` rows.
    void Take(Row* rows) const;

   private:
    const std::vector<Candidates> candidates_;
    std::vector<std::vector<uint32_t>> indices_;
  };

  absl::Status Ask(tensorflow::OpKernelContext* context, const CopyBytes& copy, Asked* asked) const;
  // Allocates the output for `count` rows.
  static absl::Status Allocate(tensorflow::OpKernelContext* context, size_t count, Row** rows);
  // Returns the threshold, or 0 if there is none.
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
  // The input rows, and the output tensors.
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
