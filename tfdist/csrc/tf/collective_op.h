// The base class of the kernels of collectives. A kernel submits an operation to its communicator
// and returns immediately.
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

// Input 0 of every kernel is the token. The tensors follow from input 1 on.
class CollectiveOp : public tensorflow::AsyncOpKernel {
 public:
  CollectiveOp(tensorflow::OpKernelConstruction* construction, Kind kind);

  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override;

 protected:
  // Describes the collective in `operation`, and allocates its outputs. Objects to which the
  // operation refers must live until the operation ends. This function runs in TensorFlow's thread
  // and must not block.
  virtual absl::Status Prepare(tensorflow::OpKernelContext* context, const Communicator& group,
                               Operation* operation) = 0;
  virtual void Enqueue(Communicator* group, Operation operation, Communicator::Done done);
  // Called in the communicator's thread after the collective has succeeded.
  virtual absl::Status Finish(tensorflow::OpKernelContext*) { return absl::OkStatus(); }

 private:
  const Kind kind_;
  std::string communicator_;
  std::string key_;
  bool overlaps_ = false;  // whether the program continues while the collective runs
};

ConstBufferList Read(const tensorflow::Tensor& tensor);
BufferList Written(tensorflow::Tensor* tensor);
// Describes inputs 1 to `count` as one list of buffers, and allocates outputs for the results. A
// result uses the memory of its input if TensorFlow allows this.
absl::Status LayList(tensorflow::OpKernelContext* context, int count, Operation* operation);
// Returns the inputs and outputs of such a list, so that the caller can keep them alive after the
// kernel has ended.
std::shared_ptr<std::vector<tensorflow::Tensor>> KeepList(tensorflow::OpKernelContext* context,
                                                          int count);
std::vector<int64_t> Dims(const tensorflow::TensorShape& shape);
// Adds a tensor that consists of rows. The number of rows may differ between ranks.
absl::Status AddRows(const tensorflow::Tensor& tensor, const char* what, Operation* operation);
ReduceOp ReductionNamed(const std::string& name);

}  // namespace tfdist::tf
