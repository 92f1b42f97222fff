// Calls a function for several GPUs of a process at once, where each waits for the others.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

#include "error.h"
#include "guard.h"

namespace tfdist {

// Ends the waits of all calls once one of them has failed.
class Siblings : public Guard {
 public:
  explicit Siblings(Guard& outer) : outer_(outer) {}
  void Fail() { failed_ = true; }
  void Check() override {
    if (failed_) throw Error(Code::kUnavailable, "Another GPU of this process has failed.");
    outer_.Check();
  }

 private:
  Guard& outer_;
  std::atomic<bool> failed_{false};
};

// Throws the error of the one that has failed first, if any. Args: what the others look at.
inline void AtOnce(size_t count, const std::function<void(size_t)>& call,
                   Siblings* siblings = nullptr) {
  if (count == 1) return call(0);
  std::atomic<bool> failed{false};
  std::exception_ptr error;
  const auto fail = [&] {
    if (failed.exchange(true)) return;
    error = std::current_exception();
    if (siblings) siblings->Fail();
  };
  std::vector<std::thread> threads;
  for (size_t i = 0; i < count && !failed; ++i) {
    try {
      threads.emplace_back([&call, &fail, i] {
        try {
          call(i);
        } catch (...) {
          fail();
        }
      });
    } catch (...) {  // there can be no more threads
      fail();
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace tfdist
