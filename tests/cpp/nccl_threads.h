// Ranks of NCCL in threads, for tests, and settings of the fake NCCL.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cpp/ranks.h"
#include "device/nccl_group.h"

namespace tfdist::testing {

// The paths of the fake libraries are in FAKE_CUDA and FAKE_NCCL; without them, NCCL_LIBRARY is the
// path of a real NCCL.
inline bool AreFake() { return std::getenv("FAKE_NCCL") != nullptr; }
inline void LoadLibraries() {
  const auto set = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::string(value ? value : "");
  };
  cuda::Load(set("FAKE_CUDA"));
  nccl::Load(set(AreFake() ? "FAKE_NCCL" : "NCCL_LIBRARY"));
}

template <typename F>
F* Fake(const char* name) {
  return reinterpret_cast<F*>(dlsym(dlopen(std::getenv("FAKE_NCCL"), RTLD_NOW), name));
}
inline void Set(const char* name, int value) {
  Fake<void(const char*, int)>("fake_nccl_set")(name, value);
}
inline std::string HeldByNccl() { return Fake<const char*()>("fake_nccl_held")(); }
inline int Calls(const char* function) {
  return Fake<int(const char*)>("fake_nccl_calls")(function);
}

// A rank with its GPU, and memory for tests.
struct Rank {
  explicit Rank(NcclGroup::Setup setup)
      : number(setup.rank), size(setup.size), gpu(0), stream(gpu), aside(gpu) {
    setup.gpu = &gpu;
    group = std::make_unique<NcclGroup>(setup);
  }

  cuda::Address Put(const std::vector<char>& values, size_t bytes = 0) {
    memories.push_back(std::make_unique<DeviceMemory>(gpu, std::max(values.size(), bytes) + 4));
    const cuda::Address at = memories.back()->address();
    Copy(at, reinterpret_cast<uintptr_t>(values.data()), values.size());
    return at;
  }
  bool Has(cuda::Address at, const std::vector<char>& expected) {
    stream.Synchronize();
    std::vector<char> found(expected.size());
    Copy(reinterpret_cast<uintptr_t>(found.data()), at, found.size());
    return found == expected;
  }
  void Copy(cuda::Address to, cuda::Address from, size_t bytes) {
    gpu.Use();
    if (bytes) {
      cuda::Check(cuda::Load().cuMemcpyAsync(to, from, bytes, aside.get()), "cuMemcpyAsync");
    }
    aside.Synchronize();
  }

  const int number, size;
  Gpu gpu;
  DeviceStream stream, aside;  // for the collectives, and for copies
  std::vector<std::unique_ptr<DeviceMemory>> memories;
  std::unique_ptr<NcclGroup> group;
};

// Runs each rank's body in a thread; throws the first failure.
inline void OnEach(int ranks, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> failures(static_cast<size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) { failures[static_cast<size_t>(rank)] = std::current_exception(); }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}
inline void OnEachOf(int ranks, const std::function<void(Rank&)>& body) {
  const nccl::UniqueId id = NcclGroup::NewId();
  OnEach(ranks, [&](int number) {
    Rank rank({nullptr, id, number, ranks});
    body(rank);
  });
}

}  // namespace tfdist::testing
