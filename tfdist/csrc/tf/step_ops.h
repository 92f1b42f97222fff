// Operations of atomic steps: the undo log, marks and shapes.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfdist::tf {

// The undo log of this process's running step; steps do not overlap.
//
// It keeps references to variables' buffers. TensorFlow's kernels copy a shared buffer before they
// change it, so only changed variables are copied.
//
// A step that is rolled back here may have committed elsewhere. It can be redone if every rank
// writes its worker-local state before it contributes to an operation that all ranks wait for: a
// rank with the committed step then knows that all ranks had written these values.
class UndoLog {
 public:
  using Variable = tensorflow::core::RefCountPtr<tensorflow::Var>;

  static UndoLog& Instance();

  // Begins a step. Args: complete: all written variables are kept, so an update can be undone.
  void Begin(bool complete);
  // Keeps a variable that the step may write before it fails.
  void Keep(Variable variable);
  // Records that the step has finished communicating, and now writes variables that are not kept.
  void UpdateBegins();
  // Commits the step.
  void Commit();
  // Restores the kept variables if a step has begun and is not committed. Returns whether this
  // undid the whole step: no update of variables that are not kept had begun.
  bool RollBack(bool redoable);
  // Restores the values that the last `RollBack` removed, if it was redoable.
  void Redo();
  // The number of committed steps.
  int64_t committed() const;

 private:
  struct Kept {
    // Swaps the variable's value and the kept value.
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
