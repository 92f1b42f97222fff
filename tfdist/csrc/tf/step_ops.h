// The undo log, with which the ops in step_ops.cc make steps atomic.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfdist::tf {

// The undo log of the step that this process currently runs. Steps do not overlap.
//
// The log keeps references to the buffers of variables. TensorFlow's kernels copy a shared buffer
// before they change it, so only variables that change are copied.
//
// A step that is rolled back on this rank may have been committed on another rank. The step can
// then be redone here, if every rank writes its worker-local state before it contributes to an
// operation for which all ranks wait. If one rank has committed the step, all ranks had already
// written this state.
class UndoLog {
 public:
  using Variable = tensorflow::core::RefCountPtr<tensorflow::Var>;

  static UndoLog& Instance();

  // Begins a step.
  // Args: complete: whether all variables that the step writes are kept, so that even an update can
  // be undone.
  void Begin(bool complete);
  // Keeps the value of a variable that the step may write before it fails.
  void Keep(Variable variable);
  // Records that the step has finished its communication. From now on, it writes variables that are
  // not kept.
  void UpdateBegins();
  // Commits the step.
  void Commit();
  // If a step has begun and has not been committed, restores the values that were kept. Returns
  // whether this has undone the whole step. It has not if the step had begun to update variables
  // that are not kept.
  // Args: redoable: whether `Redo` may be called later.
  bool RollBack(bool redoable);
  // Restores the values that the last `RollBack` removed. Has an effect only if that call was
  // redoable.
  void Redo();
  // Returns the number of committed steps.
  int64_t committed() const;

 private:
  struct Kept {
    // Exchanges the value of the variable with the kept value.
    void Swap();

    Variable variable;
    tensorflow::Tensor value;
    bool is_initialized;
  };

  mutable std::mutex mutex_;
  std::vector<Kept> kept_;
  std::vector<Kept> undone_;
  bool complete_ = false;
  bool updating_ = false;
  int64_t committed_ = 0;
};

}  // namespace tfdist::tf
