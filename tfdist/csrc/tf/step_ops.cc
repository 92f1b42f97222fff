#include "tf/step_ops.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "control/activity.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tf/collective_op.h"

namespace tfdist::tf {

UndoLog& UndoLog::Instance() {
  // The log is never destroyed, because kernels may still run while the process exits.
  static UndoLog* const log = new UndoLog;
  return *log;
}

void UndoLog::Begin(bool complete) {
  const std::lock_guard<std::mutex> lock(mutex_);
  kept_.clear();
  undone_.clear();
  complete_ = complete;
  updating_ = false;
}

void UndoLog::Keep(Variable variable) {
  Kept kept{std::move(variable), {}, false};
  {
    const tensorflow::mutex_lock lock(*kept.variable->mu());
    // After a sparse update, a variable is in copy-on-read mode. In this mode, updates modify the
    // buffer of the variable even if the buffer is shared, so they would also modify the kept
    // value. The mode is therefore turned off here. The next sparse update then copies the buffer,
    // and turns the mode on again.
    kept.variable->copy_on_read_mode.store(false);
    kept.value = *kept.variable->tensor();
    kept.is_initialized = kept.variable->is_initialized;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  kept_.push_back(std::move(kept));
}

void UndoLog::UpdateBegins() {
  const std::lock_guard<std::mutex> lock(mutex_);
  updating_ = true;
}

void UndoLog::Commit() {
  const std::lock_guard<std::mutex> lock(mutex_);
  kept_.clear();
  updating_ = false;
  ++committed_;
}

bool UndoLog::RollBack(bool redoable) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool all = complete_ || !updating_;
  for (Kept& kept : kept_) kept.Swap();
  if (redoable) undone_ = std::move(kept_);
  kept_.clear();
  updating_ = false;
  return all;
}

void UndoLog::Redo() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Kept& undone : undone_) undone.Swap();
  undone_.clear();
}

void UndoLog::Kept::Swap() {
  const tensorflow::mutex_lock lock(*variable->mu());
  variable->copy_on_read_mode.store(false);
  std::swap(*variable->tensor(), value);
  std::swap(variable->is_initialized, is_initialized);
}

int64_t UndoLog::committed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return committed_;
}

}  // namespace tfdist::tf

// The kernels that make steps atomic. They report the progress of a step to the undo log.

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
      // Skips resources that are not variables, such as tables.
      if (handle.hash_code() != TypeIndex::Make<Var>().hash_code()) continue;
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
  void Compute(OpKernelContext*) override {}  // its only purpose is to wait for the variables
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
// TensorFlow runs an op on the device of its resources, so these kernels are also registered for
// GPUs. They only hold references to buffers, so they work in the same way for buffers in GPU
// memory.
REGISTER_KERNEL_BUILDER(Name("TfdistKeep").Device(tensorflow::DEVICE_GPU).HostMemory("variables"),
                        KeepOp);
REGISTER_KERNEL_BUILDER(
    Name("TfdistUpdateBegins").Device(tensorflow::DEVICE_GPU).HostMemory("variables"),
    UpdateBeginsOp);
REGISTER_KERNEL_BUILDER(
    Name("TfdistStepPrepares").Device(tensorflow::DEVICE_GPU).HostMemory("variables"),
    StepPreparesOp);

}  // namespace
}  // namespace tfdist::tf

// The kernels that report the progress of a step to the flight recorder. They do not affect the
// results of the step.

namespace tfdist::tf {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

class ReadyOp : public OpKernel {
 public:
  explicit ReadyOp(OpKernelConstruction* construction) : OpKernel(construction) {
    std::string key;
    OP_REQUIRES_OK(construction, construction->GetAttr("communicator", &communicator_));
    OP_REQUIRES_OK(construction, construction->GetAttr("key", &key));
    OP_REQUIRES_OK(construction, construction->GetAttr("stalls", &stalls_));
    Fingerprint fingerprint;
    fingerprint.SetName(key);
    if (!key.empty()) name_ = HashOf(fingerprint);
  }

  void Compute(OpKernelContext*) override {
    try {
      Recorder& recorder = FindNamed(communicator_)->recorder();
      if (name_) {
        recorder.Ready(name_, stalls_);
      } else {
        recorder.Stalls();
      }
    } catch (const Error&) {
      // The communicator has been closed. The step's operations on this communicator will report
      // this error.
    }
  }

 private:
  std::string communicator_;
  uint64_t name_ = 0;
  bool stalls_ = false;
};

class InputBeginsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext*) override { Activity::Instance().InputBegins(); }
};

class InputEndsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext*) override { Activity::Instance().InputEnds(); }
};

// SpanBeginsOp marks the beginning of a span, and returns the current time. SpanEndsOp takes this
// time as an input, and marks the end of the span.
class SpanBeginsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* context) override {
    tensorflow::Tensor* begin = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &begin));
    begin->scalar<int64_t>()() = Spans::Instance().recording() ? Nanoseconds() : 0;
  }
};

class SpanEndsOp : public OpKernel {
 public:
  explicit SpanEndsOp(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("lane", &lane_));
    OP_REQUIRES_OK(construction, construction->GetAttr("span", &name_));
  }

  void Compute(OpKernelContext* context) override {
    const tensorflow::Tensor& given = context->input(1);
    const int64_t begin = given.NumElements() == 1 ? *given.flat<int64_t>().data() : 0;
    if (begin) Spans::Instance().Add(lane_.c_str(), name_.c_str(), begin, Nanoseconds());
  }

 private:
  std::string lane_;
  std::string name_;
};

REGISTER_KERNEL_BUILDER(Name("TfdistReady").Device(tensorflow::DEVICE_CPU), ReadyOp);
REGISTER_KERNEL_BUILDER(Name("TfdistSpanBegins").Device(tensorflow::DEVICE_CPU), SpanBeginsOp);
REGISTER_KERNEL_BUILDER(Name("TfdistSpanEnds").Device(tensorflow::DEVICE_CPU), SpanEndsOp);
REGISTER_KERNEL_BUILDER(Name("TfdistInputBegins").Device(tensorflow::DEVICE_CPU), InputBeginsOp);
REGISTER_KERNEL_BUILDER(Name("TfdistInputEnds").Device(tensorflow::DEVICE_CPU), InputEndsOp);

}  // namespace
}  // namespace tfdist::tf

// Decides whether a step uses its clusters (the parts that XLA compiles) for tensors of certain
// shapes.

namespace tfdist::tf {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

// XLA compiles a cluster separately for each new set of shapes, and each compilation takes longer
// than many steps. Clusters are therefore compiled only for frequent sets of shapes. The first set
// is compiled immediately. Another set is compiled when it occurs for the kOften-th time, unless
// there are already kMax compiled sets. For all other sets, the step does not use its clusters.
constexpr int kOften = 16;
constexpr int kMax = 16;
// The maximum number of sets of shapes with a count. Without this maximum, the counts could exhaust
// the memory, for example if every batch has rows of another length.
constexpr size_t kMaxCounted = 1024;

class ShapesFitOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    std::vector<int64_t> shapes;
    bool empty = false;
    for (int i = 1; i < context->num_inputs(); ++i) {
      const auto shape = context->input(i).flat<int64_t>();
      shapes.push_back(shape.size());
      shapes.insert(shapes.end(), shape.data(), shape.data() + shape.size());
      // A replica without rows computes in a different way, with one row of zeros, and does not use
      // clusters.
      empty |= std::count(shape.data(), shape.data() + shape.size(), 0) > 0;
    }
    tensorflow::Tensor* fits = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &fits));
    fits->scalar<bool>()() = !empty && Known(shapes);
  }

 private:
  bool Known(const std::vector<int64_t>& shapes) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (compiled_.count(shapes) > 0) return true;
    if (compiled_.size() == kMax) return false;
    // If there are too many counts, all of them are dropped. Frequent sets of shapes will soon
    // reach kOften again.
    if (times_.size() == kMaxCounted && times_.count(shapes) == 0) times_.clear();
    if (!compiled_.empty() && ++times_[shapes] < kOften) return false;
    compiled_.insert(shapes);
    times_.erase(shapes);
    if (compiled_.size() == kMax) times_.clear();
    return true;
  }

  std::mutex mutex_;
  std::set<std::vector<int64_t>> compiled_;
  // For each set of shapes that is not compiled, the number of times that it has occurred.
  std::map<std::vector<int64_t>, int> times_;
};

REGISTER_KERNEL_BUILDER(Name("TfdistShapesFit").Device(tensorflow::DEVICE_CPU), ShapesFitOp);

}  // namespace
}  // namespace tfdist::tf

// The kernel that returns this process's rank and the number of ranks.

namespace tfdist::tf {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

class GroupShapeOp : public OpKernel {
 public:
  explicit GroupShapeOp(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("communicator", &communicator_));
  }

  void Compute(OpKernelContext* context) override {
    Tensor *rank = nullptr, *size = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &rank));
    OP_REQUIRES_OK(context, context->allocate_output(1, {}, &size));
    try {
      const auto group = FindNamed(communicator_);
      rank->scalar<int32_t>()() = group->rank();
      size->scalar<int32_t>()() = group->size();
    } catch (const Error& error) { OP_REQUIRES_OK(context, ToStatus(error)); }
  }

 private:
  std::string communicator_;
};

REGISTER_KERNEL_BUILDER(Name("TfdistGroupShape").Device(tensorflow::DEVICE_CPU), GroupShapeOp);

}  // namespace
}  // namespace tfdist::tf
