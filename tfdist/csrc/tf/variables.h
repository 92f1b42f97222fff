// Variables that a kernel changes in place.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace tfdist::tf {

// A variable whose values are changed, and the memory that they are in: another value may be
// assigned meanwhile.
struct Taken {
  tensorflow::core::RefCountPtr<tensorflow::Var> variable;
  tensorflow::Tensor values;
};

// What keeps variables while their values are changed.
using Variables = std::vector<Taken>;

// Copies bytes where tensors are.
using CopyBytes = std::function<void(void* to, const void* from, size_t bytes)>;

// The values of a float32 variable with as many as a tensor, for nobody else: what others still read
// is copied. Args: input: of the kernel, the variable's resource.
absl::Status TakeValues(tensorflow::OpKernelContext* context, int input,
                        const tensorflow::Tensor& like, const CopyBytes& copy,
                        Variables* variables, float** values);

}  // namespace tfdist::tf
