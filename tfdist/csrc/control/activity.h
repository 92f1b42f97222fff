// Counters of this process's waits and operations, and spans of recorded time.
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

// Nanoseconds of the steady clock, which all processes of a host share.
int64_t Nanoseconds(std::chrono::steady_clock::time_point when = std::chrono::steady_clock::now());

// The time this process's steps spend waiting for input, for other ranks, and for the network.
//
// Totals since the process started. A step waits only while it cannot proceed: while it needs its
// input or a pending operation. If several communicators stall it at once, the time counts once.
class Activity {
 public:
  struct Totals {
    uint64_t steps = 0;       // steps that have received their input
    int64_t input = 0;        // waiting for input that has since arrived
    int64_t input_since = 0;  // start of the current wait for input; 0 for none
    int64_t waiting = 0;      // stalled until other ranks arrived
    int64_t moving = 0;       // stalled while data moved
    std::array<uint64_t, kKinds> operations = {};  // successful operations, by kind
    double bus_bytes = 0;                          // their minimum bytes per link
    int64_t bus_moving = 0;                        // their duration after all ranks had arrived
  };

  // Never destroyed: other threads may call it while the process ends.
  static Activity& Instance();

  // Records that a step begins to wait for its input, or that it has received it. At the end of the
  // data, `InputBegins` is the last call.
  void InputBegins();
  void InputEnds();
  // Records that an operation stalled this process from `begin`: it waited for other ranks until
  // `arrived`, then for data until `end`.
  void Stalled(int64_t begin, int64_t arrived, int64_t end);
  // Counts a successful operation. Args: the bytes of all values, the number of ranks, and the
  // duration of the transfer.
  void Ended(Kind kind, uint64_t bytes, size_t ranks, int64_t moving);
  Totals Read();

 private:
  void CloseInput(int64_t end);

  std::mutex mutex_;
  Totals totals_;
  int64_t input_begun_ = 0;
  int64_t counted_until_ = 0;  // the end of the last counted wait; no time counts twice
};

// A timeline of this process's activity, kept only on request.
class Spans {
 public:
  struct Span {
    std::string lane;
    std::string name;
    int64_t begin;  // nanoseconds of the steady clock
    int64_t end;
  };

  // Never destroyed: other threads may call it while the process ends.
  static Spans& Instance();

  // Clears all spans, and starts or stops keeping new ones.
  void Record(bool on);
  bool recording() const { return recording_.load(std::memory_order_relaxed); }
  // Has no effect unless spans are recorded. Spans beyond the maximum are dropped.
  void Add(const char* lane, const char* name, int64_t begin, int64_t end);
  std::vector<Span> Read();

 private:
  static constexpr size_t kMax = 1 << 18;

  std::atomic<bool> recording_{false};
  std::mutex mutex_;
  std::vector<Span> spans_;
};

// Adds a span for its own lifetime.
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
