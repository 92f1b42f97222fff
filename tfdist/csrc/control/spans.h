// What this process did when, for a timeline: kept only while it is asked for.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace tfdist {

class Spans {
 public:
  struct Span {
    std::string lane;
    std::string name;
    int64_t begin;  // nanoseconds of the steady clock
    int64_t end;
  };

  // Never destroyed: other threads may come here while the process ends.
  static Spans& Instance();

  // Forgets all, and keeps what comes from now on, or no longer.
  void Record(bool on);
  bool recording() const { return recording_.load(std::memory_order_relaxed); }
  // Without effect unless they are recorded. Beyond the most they are dropped.
  void Add(const char* lane, const char* name, int64_t begin, int64_t end);
  std::vector<Span> Read();

 private:
  static constexpr size_t kMost = 1 << 18;

  std::atomic<bool> recording_{false};
  std::mutex mutex_;
  std::vector<Span> spans_;
};

// Adds the time that it lives.
class SpanScope {
 public:
  SpanScope(const char* lane, const char* name);
  ~SpanScope();
  SpanScope(const SpanScope&) = delete;
  SpanScope& operator=(const SpanScope&) = delete;

 private:
  const char* lane_;
  const char* name_;
  int64_t begin_;  // 0 unless spans are recorded
};

}  // namespace tfdist
