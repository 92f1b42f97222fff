// The base of all kernels: they submit a collective to its communicator and return at once.
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

// Input 0 of every operation is the token; the tensors follow.
class CollectiveOp : public tensorflow::AsyncOpKernel {
 public:
  CollectiveOp(tensorflow::OpKernelConstruction* construction, Kind kind);

  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override;

 protected:
  // Describes the collective and prepares its outputs. Objects that the operation refers to must
  // live until it ends. Runs in TensorFlow's thread and must not block.
  virtual absl::Status Prepare(tensorflow::OpKernelContext* context, const Communicator& group,
                               Operation* operation) = 0;
  virtual void Enqueue(Communicator* group, Operation operation, Communicator::Done done);
  // Called after the collective, in the communicator's thread.
  virtual absl::Status Finish(tensorflow::OpKernelContext*) { return absl::OkStatus(); }

 private:
  const Kind kind_;
  std::string communicator_;
  std::string key_;
  bool overlaps_ = false;  // the program continues meanwhile
};

ConstBufferList Read(const tensorflow::Tensor& tensor);
BufferList Written(tensorflow::Tensor* tensor);
// Lays out inputs 1 to `count` as one buffer list, and the outputs for the results: in place if
// TensorFlow allows it.
absl::Status LayList(tensorflow::OpKernelContext* context, int count, Operation* operation);
// Keeps the tensors of such a list and the results alive after the operation.
std::shared_ptr<std::vector<tensorflow::Tensor>> KeepList(tensorflow::OpKernelContext* context,
                                                          int count);
std::vector<int64_t> Dims(const tensorflow::TensorShape& shape);
// Adds a tensor of rows; the number of rows may differ between ranks.
absl::Status AddRows(const tensorflow::Tensor& tensor, const char* what, Operation* operation);
ReduceOp ReductionNamed(const std::string& name);

}  // namespace tfdist::tf
