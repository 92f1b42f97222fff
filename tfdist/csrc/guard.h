// What ends a wait early.
#pragma once

namespace tfdist {

// Called again and again by whoever waits.
class Guard {
 public:
  virtual ~Guard() = default;
  // Throws Error when the wait is in vain: aborted, a rank lost, out of time.
  virtual void Check() = 0;
  // Notes that this rank has made progress: it has moved bytes, or begins another wait. Patience
  // counts from then.
  virtual void NoteProgress() {}
};

}  // namespace tfdist
