#include "tf/collective_op.h"

#include "absl/status/status.h"
#include "tensorflow/core/framework/cancellation.h"

namespace tfdist::tf {

using tensorflow::CancellationManager;
using tensorflow::CancellationToken;
using tensorflow::DataType;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

DType FromTensorFlow(DataType type) {
  switch (type) {
    case tensorflow::DT_BOOL:
      return DType::kBool;
    case tensorflow::DT_UINT8:
      return DType::kUint8;
    case tensorflow::DT_INT8:
      return DType::kInt8;
    case tensorflow::DT_INT32:
      return DType::kInt32;
    case tensorflow::DT_INT64:
      return DType::kInt64;
    case tensorflow::DT_HALF:
      return DType::kFloat16;
    case tensorflow::DT_BFLOAT16:
      return DType::kBfloat16;
    case tensorflow::DT_FLOAT:
      return DType::kFloat32;
    default:
      return DType::kFloat64;  // the ops accept no other types
  }
}

absl::Status ToStatus(const Error& error) {
  switch (error.code()) {
    case Code::kInvalidArgument:
      return absl::InvalidArgumentError(error.what());
    case Code::kMismatch:
    case Code::kClosed:
      return absl::FailedPreconditionError(error.what());
    case Code::kUnavailable:
      return absl::UnavailableError(error.what());
    case Code::kInternal:
      return absl::InternalError(error.what());
    case Code::kCancelled:
      return absl::CancelledError(error.what());
  }
  return absl::InternalError(error.what());
}

CollectiveOp::CollectiveOp(OpKernelConstruction* construction, Kind kind)
    : AsyncOpKernel(construction), kind_(kind) {
  OP_REQUIRES_OK(construction, construction->GetAttr("communicator", &communicator_));
  OP_REQUIRES_OK(construction, construction->GetAttr("key", &key_));
  // By default, only a send overlaps: the step continues while the message is being sent. For the
  // ops that have the attribute `overlaps`, this attribute decides.
  overlaps_ = kind == Kind::kSend;
  if (construction->HasAttr("overlaps")) {
    OP_REQUIRES_OK(construction, construction->GetAttr("overlaps", &overlaps_));
  }
}

void CollectiveOp::ComputeAsync(OpKernelContext* context, DoneCallback done) {
  std::shared_ptr<Communicator> group;
  Operation operation;
  try {
    group = FindNamed(communicator_);
    operation.fingerprint.kind = kind_;
    operation.fingerprint.SetName(key_);
    operation.overlaps = overlaps_;
    if (context->num_inputs() > 1) {
      operation.fingerprint.type = FromTensorFlow(context->input_dtype(1));
    }
    OP_REQUIRES_OK_ASYNC(context, Prepare(context, *group, &operation), done);
    CancellationManager* const manager = context->cancellation_manager();
    CancellationToken token = CancellationManager::kInvalidToken;
    if (manager) {
      const auto cancellation = std::make_shared<Cancellation>();
      token = manager->get_cancellation_token();
      const bool goes_on =
          manager->RegisterCallback(token, [cancellation] { cancellation->Ask(); });
      OP_REQUIRES_ASYNC(context, goes_on,
                        absl::CancelledError("The step has ended before this collective began."),
                        done);
      operation.cancellation = cancellation;
    }
    const auto end = [this, context, done, manager, token](const Error* error) {
      // This call does not wait for a callback that is running. Waiting is unnecessary, because the
      // callback uses only `cancellation`, which it keeps alive.
      if (manager) manager->TryDeregisterCallback(token);
      OP_REQUIRES_OK_ASYNC(context, error ? ToStatus(*error) : Finish(context), done);
      done();
    };
    Enqueue(group.get(), std::move(operation), end);
  } catch (const Error& error) {
    OP_REQUIRES_OK_ASYNC(context, ToStatus(error), done);
  } catch (const std::exception& error) {  // out of memory
    OP_REQUIRES_OK_ASYNC(context, absl::InternalError(error.what()), done);
  }
}

void CollectiveOp::Enqueue(Communicator* group, Operation operation, Communicator::Done done) {
  if (group->gpus().size() > 1 && operation.fingerprint.kind != Kind::kBarrier) {
    const Error error(Code::kInvalidArgument,
                      "The communicator '" + group->name() +
                          "' accepts only tensors on this process's GPUs. Received: " +
                          Describe(operation.fingerprint) + " in the host's memory.");
    return done(&error);
  }
  group->Enqueue(std::move(operation), std::move(done));
}

ConstBufferList Read(const Tensor& tensor) {
  return ConstBufferList(static_cast<const char*>(tensor.data()), tensor.TotalBytes());
}

BufferList Written(Tensor* tensor) {
  return BufferList(static_cast<char*>(tensor->data()), tensor->TotalBytes());
}

absl::Status LayList(OpKernelContext* context, int count, Operation* operation) {
  std::vector<BasicBuffer<const char>> in;
  std::vector<BasicBuffer<char>> out;
  for (int i = 1; i <= count; ++i) {
    const Tensor& tensor = context->input(i);
    Tensor* result = nullptr;
    TF_RETURN_IF_ERROR(
        context->forward_input_or_allocate_output({i}, i - 1, tensor.shape(), &result));
    in.push_back({static_cast<const char*>(tensor.data()), tensor.TotalBytes()});
    out.push_back({static_cast<char*>(result->data()), result->TotalBytes()});
    operation->fingerprint.AddShape(Dims(tensor.shape()));
  }
  operation->in = ConstBufferList(in);
  operation->out = BufferList(out);
  return absl::OkStatus();
}

std::shared_ptr<std::vector<Tensor>> KeepList(OpKernelContext* context, int count) {
  const auto kept = std::make_shared<std::vector<Tensor>>();
  for (int i = 0; i < count; ++i) {
    kept->push_back(context->input(1 + i));
    kept->push_back(*context->mutable_output(i));
  }
  return kept;
}

std::vector<int64_t> Dims(const tensorflow::TensorShape& shape) {
  const auto dims = shape.dim_sizes();
  return {dims.begin(), dims.end()};
}

absl::Status AddRows(const Tensor& tensor, const char* what, Operation* operation) {
  if (tensor.dims() == 0) {
    return absl::InvalidArgumentError(std::string(what) +
                                      " needs a tensor with a first axis. Received: a scalar. "
                                      "Reshape it to [1].");
  }
  operation->fingerprint.AddRows(Dims(tensor.shape()));
  operation->row_bytes = static_cast<size_t>(tensorflow::DataTypeSize(tensor.dtype()));
  for (int axis = 1; axis < tensor.dims(); ++axis) {
    operation->row_bytes *= static_cast<size_t>(tensor.dim_size(axis));
  }
  return absl::OkStatus();
}

ReduceOp ReductionNamed(const std::string& name) {
  for (int op = 0; op < kReduceOps; ++op) {
    if (name == NameOf(static_cast<ReduceOp>(op))) return static_cast<ReduceOp>(op);
  }
  return ReduceOp::kSum;  // the ops accept no other reductions
}

}  // namespace tfdist::tf
