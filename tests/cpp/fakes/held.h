// The resources that a fake library has handed out and not got back.
#pragma once

#include <map>
#include <mutex>
#include <string>

namespace tfdist::fakes {

class Held {
 public:
  // Args: change: 1 for a new resource, -1 for a returned one.
  void Count(const char* what, int change) {
    const std::lock_guard<std::mutex> lock(mutex_);
    counts_[what] += change;
  }
  // Such as "events: 2, streams: 1"; "" for none. Valid until this thread's next call.
  const char* Text() {
    thread_local std::string text;
    const std::lock_guard<std::mutex> lock(mutex_);
    text.clear();
    for (const auto& [what, count] : counts_) {
      if (count == 0) continue;
      text += (text.empty() ? "" : ", ") + what + ": " + std::to_string(count);
    }
    return text.c_str();
  }

 private:
  std::mutex mutex_;
  std::map<std::string, int> counts_;
};

}  // namespace tfdist::fakes
