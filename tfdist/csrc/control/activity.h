// Counters of a communicator, and spans of recorded time.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "types.h"

namespace tfdist {

// What this process has spent its steps on: waiting for input, for other ranks, for the network.
//
// Nanoseconds of the steady clock, which all processes of a host share.
int64_t Nanoseconds(std::chrono::steady_clock::time_point when = std::chrono::steady_clock::now());

// Counts since the process began. Time in which the program goes on meanwhile is no waiting: it is
// stalled only while an operation is pending that it cannot do without. Where several communicators
// stall it at the same time, the time counts once.
class Activity {
 public:
  struct Totals {
    uint64_t steps = 0;       // that have got their input
    int64_t input = 0;        // waiting for it, once it has come
    int64_t input_since = 0;  // when the wait for it began that still lasts; 0 for none
    int64_t waiting = 0;      // stalled until other ranks came
    int64_t moving = 0;       // stalled while data moved
    std::array<uint64_t, kKinds> operations = {};  // that have ended well, by kind
    double bus_bytes = 0;                          // of them, as each link must carry at least
    int64_t bus_moving = 0;                        // how long they took once all ranks had come
  };

  // Never destroyed: other threads may come here while the process ends.
  static Activity& Instance();

  // A step waits for its input, and has got it; where the data ends there is no second call.
  void InputBegins();
  void InputEnds();
  // An operation has stalled this process from `begin` on: until `arrived` for other ranks, until
  // `end` for data.
  void Stalled(int64_t begin, int64_t arrived, int64_t end);
  // Args: the bytes of all values, how many ranks there are, and how long they moved.
  void Ended(Kind kind, uint64_t bytes, size_t ranks, int64_t moving);
  Totals Read();

 private:
  void CloseInput(int64_t end);

  std::mutex mutex_;
  Totals totals_;
  int64_t input_begun_ = 0;
  int64_t counted_until_ = 0;  // nothing counts twice
};

// What this process did when, for a timeline: kept only while it is asked for.
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
