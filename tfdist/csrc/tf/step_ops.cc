// The kernels by which a step counts or leaves no trace: they tell the undo log how far it has come.
#include <utility>

#include "tensorflow/core/framework/op_kernel.h"
#include "tf/undo_log.h"

namespace tfdist::tf {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::ResourceHandle;
using tensorflow::Tensor;
using tensorflow::TypeIndex;
using tensorflow::Var;

class StepBeginsOp : public OpKernel {
 public:
  explicit StepBeginsOp(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("complete", &complete_));
  }
  void Compute(OpKernelContext*) override { UndoLog::Instance().Begin(complete_); }

 private:
  bool complete_ = false;
};

class KeepOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    for (int i = 0; i < context->num_inputs(); ++i) {
      const ResourceHandle& handle = tensorflow::HandleFromInput(context, i);
      if (handle.hash_code() != TypeIndex::Make<Var>().hash_code()) continue;  // such as a table
      UndoLog::Variable variable;
      OP_REQUIRES_OK(context, tensorflow::LookupResource(context, handle, &variable));
      UndoLog::Instance().Keep(std::move(variable));
    }
  }
};

class UpdateBeginsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext*) override { UndoLog::Instance().UpdateBegins(); }
};

class StepPreparesOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext*) override {}  // that it waits for the variables is all
};

class StepCommitsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext*) override { UndoLog::Instance().Commit(); }
};

class RollBackOp : public OpKernel {
 public:
  explicit RollBackOp(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("redoable", &redoable_));
  }

  void Compute(OpKernelContext* context) override {
    Tensor *committed = nullptr, *whole = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &committed));
    OP_REQUIRES_OK(context, context->allocate_output(1, {}, &whole));
    whole->scalar<bool>()() = UndoLog::Instance().RollBack(redoable_);
    committed->scalar<int64_t>()() = UndoLog::Instance().committed();
  }

 private:
  bool redoable_ = false;
};

class RedoOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext*) override { UndoLog::Instance().Redo(); }
};

#define TFDIST_KERNEL(name, kernel) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), kernel);

TFDIST_KERNEL("TfdistStepBegins", StepBeginsOp)
TFDIST_KERNEL("TfdistKeep", KeepOp)
TFDIST_KERNEL("TfdistUpdateBegins", UpdateBeginsOp)
TFDIST_KERNEL("TfdistStepPrepares", StepPreparesOp)
TFDIST_KERNEL("TfdistStepCommits", StepCommitsOp)
TFDIST_KERNEL("TfdistRollBack", RollBackOp)
TFDIST_KERNEL("TfdistRedo", RedoOp)
// An operation runs where its resources are; a reference to a buffer of a GPU is as good.
REGISTER_KERNEL_BUILDER(
    Name("TfdistKeep").Device(tensorflow::DEVICE_GPU).HostMemory("variables"), KeepOp);
REGISTER_KERNEL_BUILDER(
    Name("TfdistUpdateBegins").Device(tensorflow::DEVICE_GPU).HostMemory("variables"),
    UpdateBeginsOp);
REGISTER_KERNEL_BUILDER(
    Name("TfdistStepPrepares").Device(tensorflow::DEVICE_GPU).HostMemory("variables"),
    StepPreparesOp);

}  // namespace
}  // namespace tfdist::tf
