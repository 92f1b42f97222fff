// Counters of this process's operations and of the time that it waits, and a timeline of its
// activity.
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

// Returns a time of the steady clock in nanoseconds. All processes of a host share this clock.
int64_t Nanoseconds(std::chrono::steady_clock::time_point when = std::chrono::steady_clock::now());

// The time that this process's steps have spent waiting for input, for other ranks, and for the
// network, since the process started.
//
// A step waits only while it cannot proceed, because it needs its input or the result of an
// operation. If several communicators stall the process at the same time, this time is counted
// once.
class Activity {
 public:
  struct Totals {
    uint64_t steps = 0;       // number of steps that have received their input
    int64_t input = 0;        // time of all waits for input that have ended
    int64_t input_since = 0;  // start of the current wait for input; 0 if there is none
    int64_t waiting = 0;      // time during which steps waited for other ranks
    int64_t moving = 0;       // time during which steps waited for data
    std::array<uint64_t, kKinds> operations = {};  // number of successful operations of each kind
    // The minimum number of bytes that each link must carry for these operations.
    double bus_bytes = 0;
    // The duration of these operations, measured from the time when all ranks had arrived.
    int64_t bus_moving = 0;
  };

  // Never destroyed, because other threads may still call it while the process ends.
  static Activity& Instance();

  // `InputBegins` records that a step begins to wait for its input, and `InputEnds` records that
  // the step has received the input. At the end of the data, `InputEnds` is not called.
  void InputBegins();
  void InputEnds();
  // Records that an operation stalled this process. From `begin` until `arrived`, the operation
  // waited for other ranks; from `arrived` until `end`, it waited for data.
  void Stalled(int64_t begin, int64_t arrived, int64_t end);
  // Counts a successful operation.
  // Args: bytes: the size of all values; ranks: the number of ranks; moving: the duration of the
  // transfer.
  void Ended(Kind kind, uint64_t bytes, size_t ranks, int64_t moving);
  Totals Read();

 private:
  void CloseInput(int64_t end);

  std::mutex mutex_;
  Totals totals_;
  int64_t input_begun_ = 0;
  int64_t counted_until_ = 0;  // the end of the last counted wait, so that no time counts twice
};

// A timeline of this process's activity. Spans are recorded only on request.
class Spans {
 public:
  struct Span {
    std::string lane;
    std::string name;
    int64_t begin;  // nanoseconds of the steady clock
    int64_t end;
  };

  // Never destroyed, because other threads may still call it while the process ends.
  static Spans& Instance();

  // Removes all spans, and starts or stops recording new ones.
  void Record(bool on);
  bool recording() const { return recording_.load(std::memory_order_relaxed); }
  // Adds a span. Has no effect unless spans are recorded. If the maximum number of spans has been
  // reached, the span is dropped.
  void Add(const char* lane, const char* name, int64_t begin, int64_t end);
  std::vector<Span> Read();

 private:
  static constexpr size_t kMax = 1 << 18;

  std::atomic<bool> recording_{false};
  std::mutex mutex_;
  std::vector<Span> spans_;
};

// Adds a span that lasts from the construction of this object to its destruction.
class SpanScope {
 public:
  SpanScope(const char* lane, const char* name);
  ~SpanScope();
  SpanScope(const SpanScope&) = delete;
  SpanScope& operator=(const SpanScope&) = delete;

 private:
  const char* lane_;
  const char* name_;
  int64_t begin_;  // 0 if spans are not recorded
};

}  // namespace tfdist
