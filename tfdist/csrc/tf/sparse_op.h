// The kernels that make rows of a sparse gradient from tensors, and tensors from rows: an index and a
// value each, by their bits.
#pragma once

#include <string>
#include <vector>

#include "sparse/rows.h"
#include "sparse/select.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tf/variables.h"

namespace tfdist::tf {

class SelectOp : public tensorflow::OpKernel {
 public:
  explicit SelectOp(tensorflow::OpKernelConstruction* construction);

  void Compute(tensorflow::OpKernelContext* context) override;

 protected:
  // What is selected from in a step.
  struct Asked {
    std::vector<Candidates> candidates;  // of each tensor
    std::vector<size_t> selected;        // how many of each, unless there is a threshold
    Variables variables;
  };
  // What was selected, on the host.
  class Selected {
   public:
    Selected(const std::vector<Candidates>& candidates, const std::vector<size_t>& selected,
             float threshold);

    size_t rows() const;
    // Moves the values to so many rows.
    void Take(Row* rows) const;

   private:
    const std::vector<Candidates> candidates_;
    std::vector<std::vector<uint32_t>> indices_;
  };

  absl::Status Ask(tensorflow::OpKernelContext* context, const CopyBytes& copy, Asked* asked) const;
  // The output, for so many rows.
  static absl::Status Allocate(tensorflow::OpKernelContext* context, size_t count, Row** rows);
  // 0 for none.
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
