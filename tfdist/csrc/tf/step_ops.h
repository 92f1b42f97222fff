// The undo log. The ops in step_ops.cc use it to make steps atomic.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfdist::tf {

// The undo log of the step that this process is running. A process runs only one step at a time.
//
// To keep the value of a variable, the log holds a reference to the variable's buffer. TensorFlow's
// kernels copy a shared buffer before they modify it, so only the variables that the step modifies
// are copied.
//
// If a rank fails, the step may be rolled back on this rank although another rank has already
// committed it. This rank can then redo the step, if its own worker-local state has been written.
// Therefore, every rank writes its worker-local state before it contributes to a collective in
// which all ranks wait for each other. A rank commits the step only after this collective, so all
// ranks have written this state by then.
class UndoLog {
 public:
  using Variable = tensorflow::core::RefCountPtr<tensorflow::Var>;

  static UndoLog& Instance();

  // Begins a step.
  // Args: complete: whether `Keep` will be called for all variables that the step writes. If so,
  // the step can be undone even while it updates variables.
  void Begin(bool complete);
  // Keeps the current value of a variable that the step may write, so that `RollBack` can restore
  // it.
  void Keep(Variable variable);
  // Records that the step has finished its communication. From now on, the step may also write
  // variables that have not been kept.
  void UpdateBegins();
  // Commits the step.
  void Commit();
  // If the current step has not been committed, restores the values that were kept. Returns whether
  // the whole step has been undone. Returns false if the step had begun to update variables that
  // were not kept.
  // Args: redoable: whether to keep the values that the step had written, so that `Redo` can
  // restore them.
  bool RollBack(bool redoable);
  // Restores the values that the step had written before the last call of `RollBack`. Has an effect
  // only if this call was redoable.
  void Redo();
  // Returns the number of committed steps.
  int64_t committed() const;

 private:
  struct Kept {
    // Exchanges the current value of the variable with the kept value.
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
