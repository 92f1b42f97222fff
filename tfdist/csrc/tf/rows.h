// Some rows of a tensor, which refer to its memory where that is safe.
#pragma once

#include <cstdint>

#include "tensorflow/core/common_runtime/dma_helper.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_util.h"

namespace tfdist::tf {

// A batch may be the memory of an array that a Python generator has yielded. TensorFlow knows that
// of the batch, but not of a slice, which the next operation would overwrite with its result.
inline tensorflow::Tensor TakeRows(const tensorflow::Tensor& tensor, int64_t start, int64_t stop) {
  tensorflow::Tensor rows = tensor.Slice(start, stop);
  const tensorflow::TensorBuffer* buffer = tensorflow::DMAHelper::buffer(&tensor);
  const bool is_borrowed = buffer != nullptr && !buffer->OwnsMemory();
  return is_borrowed ? tensorflow::tensor::DeepCopy(rows) : rows;
}

}  // namespace tfdist::tf
