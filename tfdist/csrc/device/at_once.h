// Calls a function for several GPUs of a process at once, where each waits for the others.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

namespace tfdist {

// Throws the first error.
inline void AtOnce(size_t count, const std::function<void(size_t)>& call) {
  if (count == 1) return call(0);
  std::vector<std::exception_ptr> errors(count);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      try {
        call(i);
      } catch (...) {
        errors[i] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace tfdist
