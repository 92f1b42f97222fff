// Memory of the fake NCCL, and the parts of it that communicators have registered.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <iterator>
#include <mutex>
#include <set>

#include "cpp/fakes/nccl_ranks.h"

namespace tfdist::nccl {

constexpr Result kInvalidArgument = 4;

class Memory {
 public:
  void* Allocate(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    held.Count("memory", 1);
    return *allocated_.insert(std::malloc(bytes)).first;
  }
  // Registered memory must be deregistered first.
  Result Free(void* memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Handle* each : registered_) {
      if (each->memory == memory) return kInvalidUsage;
    }
    if (!allocated_.erase(memory)) return kInvalidArgument;
    held.Count("memory", -1);
    std::free(memory);
    return kSuccess;
  }

  Result Register(const Comm* comm, void* memory, void** handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!allocated_.count(memory)) return kInvalidArgument;
    held.Count("registered memory", 1);
    *handle = *registered_.insert(new Handle{comm, memory}).first;
    return kSuccess;
  }
  Result Deregister(const Comm* comm, void* handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = registered_.find(static_cast<Handle*>(handle));
    if (found == registered_.end() || (*found)->comm != comm) return kInvalidArgument;
    Forget(found);
    return kSuccess;
  }
  // Like an abort.
  void DeregisterAll(const Comm* comm) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto each = registered_.begin(); each != registered_.end();) {
      each = (*each)->comm == comm ? Forget(each) : std::next(each);
    }
  }

 private:
  struct Handle {
    const Comm* comm;
    const void* memory;
  };
  using Handles = std::set<Handle*>;

  Handles::iterator Forget(Handles::iterator handle) {
    held.Count("registered memory", -1);
    delete *handle;
    return registered_.erase(handle);
  }

  std::mutex mutex_;
  std::set<void*> allocated_;
  Handles registered_;
};

}  // namespace tfdist::nccl
