// The base class of the TensorFlow kernels that run collectives. A kernel passes an operation to
// its communicator and returns immediately.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "communicator.h"
#include "registry.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist::tf {

DType FromTensorFlow(tensorflow::DataType type);
absl::Status ToStatus(const Error& error);

// Input 0 of every kernel is the token (see ops.cc), and the tensors begin at input 1.
class CollectiveOp : public tensorflow::AsyncOpKernel {
 public:
  CollectiveOp(tensorflow::OpKernelConstruction* construction, Kind kind);

  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override;

 protected:
  // Fills in `operation` and allocates the outputs of the kernel. Objects to which the operation
  // refers must live until the operation ends. This function runs in one of TensorFlow's threads,
  // so it must not block.
  virtual absl::Status Prepare(tensorflow::OpKernelContext* context, const Communicator& group,
                               Operation* operation) = 0;
  virtual void Enqueue(Communicator* group, Operation operation, Communicator::Done done);
  // Called in the communicator's thread after the collective has succeeded.
  virtual absl::Status Finish(tensorflow::OpKernelContext*) { return absl::OkStatus(); }

 private:
  const Kind kind_;
  std::string communicator_;
  std::string key_;
  bool overlaps_ = false;  // whether the step continues while the collective runs
};

ConstBufferList Read(const tensorflow::Tensor& tensor);
BufferList Written(tensorflow::Tensor* tensor);
// Describes the inputs 1 to `count` as one list of buffers, and allocates the outputs. If
// TensorFlow allows it, an output uses the memory of its input.
absl::Status LayList(tensorflow::OpKernelContext* context, int count, Operation* operation);
// Returns the inputs 1 to `count` and their outputs, so that the caller can keep their memory alive
// after the kernel has ended.
std::shared_ptr<std::vector<tensorflow::Tensor>> KeepList(tensorflow::OpKernelContext* context,
                                                          int count);
std::vector<int64_t> Dims(const tensorflow::TensorShape& shape);
// Adds a tensor to the operation. The tensor consists of rows along its first axis, and the number
// of rows may differ between ranks.
// Args: what: the name of the collective, for error messages.
absl::Status AddRows(const tensorflow::Tensor& tensor, const char* what, Operation* operation);
ReduceOp ReductionNamed(const std::string& name);

}  // namespace tfdist::tf
