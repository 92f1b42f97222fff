// Operations of atomic steps: the undo log, marks and shapes.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfdist::tf {

// The log of this process's running step; steps do not overlap.
//
// What is kept is a reference to a variable's buffer. TensorFlow's kernels copy a buffer before
// they change it if anybody else refers to it, so only what a step does change is copied.
//
// A step that is taken back here may stand elsewhere. It can be redone if every rank writes what it
// alone holds before it gives its part of something that all ranks wait for: then whoever has the
// step knows that all had written these values.
class UndoLog {
 public:
  using Variable = tensorflow::core::RefCountPtr<tensorflow::Var>;

  static UndoLog& Instance();

  // A step begins. Args: complete: all that it writes is kept, so an update can be undone.
  void Begin(bool complete);
  // The step may write this variable and then fail.
  void Keep(Variable variable);
  // The step has communicated all it has to, and now writes variables that are not kept.
  void UpdateBegins();
  // The step stands.
  void Commit();
  // Restores what is kept, if a step has begun and does not stand. Returns whether that was all: an
  // update of variables that are not kept has not begun.
  // Args: redoable: keeps what it takes out, until the next step begins.
  bool RollBack(bool redoable);
  // Puts back what the last roll-back has taken out, if it is redoable.
  void Redo();
  // How many steps stand.
  int64_t committed() const;

 private:
  struct Kept {
    // Exchanges the variable's value and this one.
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
