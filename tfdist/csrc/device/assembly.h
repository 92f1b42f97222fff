// An operation of a process with several GPUs, each of which brings its part when its program comes to it.
#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "collective/operation.h"
#include "error.h"

namespace tfdist {

class Assembly {
 public:
  // Null, or what went wrong.
  using Done = std::function<void(const Error*)>;

  explicit Assembly(size_t gpus) : parts_(gpus) {}

  // Adds a GPU's part. `done` is called at the end of the operation, at once if that has come.
  void Add(size_t gpu, Operation part, Done done);
  // Waits for all parts, or for what ends the wait, and returns them in the order of the GPUs; empty
  // if some are missing. Throws Error(kMismatch) where they are not alike, and Error(kUnavailable)
  // that names a GPU whose part has not come in time.
  std::vector<Operation> Await(double seconds, const std::function<bool()>& ends);
  // Tells everyone how it ended.
  void End(const Error* error);

 private:
  struct Part {
    std::optional<Operation> operation;
    Done done;
  };

  void CheckAlike() const;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Part> parts_;
  size_t missing_ = parts_.size();
  bool ended_ = false;
  std::optional<Error> error_;
};

// The operations that some GPU has come to, and not yet all.
class Assemblies {
 public:
  explicit Assemblies(size_t gpus) : gpus_(gpus) {}

  // The one that a GPU comes to now, and whether it is the first to.
  std::shared_ptr<Assembly> Next(size_t gpu, bool* is_first);
  // Expects no more parts of an operation that has ended.
  void Drop(const Assembly* ended);

 private:
  struct Open {
    std::shared_ptr<Assembly> assembly;
    std::vector<bool> come;
  };

  const size_t gpus_;
  std::mutex mutex_;
  std::list<Open> open_;
};

}  // namespace tfdist
