// The kernels that select the rows of a sparse gradient, and the kernels that sum such rows.
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

// Returns the rows [start, stop) of a tensor. If it is safe, the rows share the memory of the
// tensor instead of being copied.
//
// Sharing is not safe if the tensor borrows the memory of an array that a Python generator has
// yielded. TensorFlow does not overwrite the memory of such a tensor. But TensorFlow does not know
// that a slice of the tensor also uses borrowed memory, so it could overwrite the slice.
inline tensorflow::Tensor TakeRows(const tensorflow::Tensor& tensor, int64_t start, int64_t stop) {
  tensorflow::Tensor rows = tensor.Slice(start, stop);
  const tensorflow::TensorBuffer* buffer = tensorflow::DMAHelper::buffer(&tensor);
  const bool is_borrowed = buffer != nullptr && !buffer->OwnsMemory();
  return is_borrowed ? tensorflow::tensor::DeepCopy(rows) : rows;
}

}  // namespace tfdist::tf

// Variables that a kernel modifies in place.

namespace tfdist::tf {

// A variable that a kernel modifies, and the tensor with its values. The tensor keeps this memory
// valid even if the program assigns another value to the variable in the meantime.
struct Taken {
  tensorflow::core::RefCountPtr<tensorflow::Var> variable;
  tensorflow::Tensor values;
};

// The variables that a kernel modifies. As long as the list exists, they are not destroyed.
using Variables = std::vector<Taken>;

// A function that copies bytes from the memory of one tensor to the memory of another tensor.
using CopyBytes = std::function<void(void* to, const void* from, size_t bytes)>;

// Gets exclusive access to the values of a float32 variable, sets `*values` to their address, and
// adds the variable to `*variables`. The variable must have as many values as `like`. If other
// tensors share the values, the variable first gets its own copy.
// Args: input: the index of the kernel input that holds the variable's resource.
absl::Status TakeValues(tensorflow::OpKernelContext* context, int input,
                        const tensorflow::Tensor& like, const CopyBytes& copy, Variables* variables,
                        float** values);

}  // namespace tfdist::tf

// The kernels that select values of tensors, which become the rows of a sparse gradient, and the
// kernels that sum rows into tensors. A row consists of an index and the bits of a value.

namespace tfdist::tf {

class SelectOp : public tensorflow::OpKernel {
 public:
  explicit SelectOp(tensorflow::OpKernelConstruction* construction);

  void Compute(tensorflow::OpKernelContext* context) override;

 protected:
  // The inputs of one call of the kernel.
  struct Asked {
    std::vector<Candidates> candidates;  // one element for each tensor
    // If there is no threshold, the number of values to select from each tensor.
    std::vector<size_t> selected;
    Variables variables;
  };
  // The values that the host has selected.
  class Selected {
   public:
    Selected(const std::vector<Candidates>& candidates, const std::vector<size_t>& selected,
             float threshold);

    size_t rows() const;
    // Writes the selected values to the array `rows`, and sets them to zero in the residuals and
    // momenta. The array must have space for as many rows as the member function `rows` returns.
    void Take(Row* rows) const;

   private:
    const std::vector<Candidates> candidates_;
    std::vector<std::vector<uint32_t>> indices_;
  };

  absl::Status Ask(tensorflow::OpKernelContext* context, const CopyBytes& copy, Asked* asked) const;
  // Allocates the output for `count` rows, and sets `*rows` to its memory.
  static absl::Status Allocate(tensorflow::OpKernelContext* context, size_t count, Row** rows);
  // Returns the minimum magnitude of the values that are selected, or 0 if a fixed number of values
  // is selected.
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
  // The input rows, and the output tensors into which the rows are summed.
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
