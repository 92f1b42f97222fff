#include "tf/undo_log.h"

#include <utility>

namespace tfdist::tf {

UndoLog& UndoLog::Instance() {
  static UndoLog* const log = new UndoLog;  // never destroyed: kernels may still run at exit
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
    // Sparse updates have put the variable into a mode in which they change its buffer without
    // looking who refers to it. The next one now copies the buffer first, and restores the mode.
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
