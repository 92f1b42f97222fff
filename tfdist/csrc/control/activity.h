// Counters of this process's operations, measurements of the time that its steps spend waiting, and
// a timeline of its activity.
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

// Returns a time of the steady clock in nanoseconds. All processes of a host share this clock, so
// their times can be compared.
int64_t Nanoseconds(std::chrono::steady_clock::time_point when = std::chrono::steady_clock::now());

// Measures how long this process's steps have waited for input, for other ranks, and for the
// network since the process started.
//
// A step counts as waiting only while it has nothing to compute until its input arrives or an
// operation ends. If several communicators make the process wait at the same time, this time is
// counted only once.
class Activity {
 public:
  struct Totals {
    uint64_t steps = 0;       // the number of steps that have received their input
    int64_t input = 0;        // the total time of all waits for input that have ended
    int64_t input_since = 0;  // the start of the current wait for input; 0 if there is none
    // The time that steps have waited for other ranks to join an operation.
    int64_t waiting = 0;
    // The time that steps have waited for data to move after all ranks had joined.
    int64_t moving = 0;
    // The number of successful operations of each kind.
    std::array<uint64_t, kKinds> operations = {};
    // The number of bytes that each link must carry for these operations if the best algorithm is
    // used.
    double bus_bytes = 0;
    // The total duration of these operations. Each duration is measured from the arrival of the
    // last rank. The quotient of `bus_bytes` and `bus_moving` is the bus bandwidth.
    int64_t bus_moving = 0;
  };

  // Returns the only object of this class. The object is never destroyed, because other threads may
  // still use it while the process exits.
  static Activity& Instance();

  // `InputBegins` records that a step begins to wait for its input, and `InputEnds` records that
  // the step has received the input. If the data ends, the step receives no input, and `InputEnds`
  // is not called.
  void InputBegins();
  void InputEnds();
  // Records that an operation made this process wait. From `begin` until `arrived`, the process
  // waited for other ranks to join the operation. From `arrived` until `end`, it waited for data to
  // move.
  void Stalled(int64_t begin, int64_t arrived, int64_t end);
  // Counts a successful operation.
  // Args:
  //   bytes: the size of the operation's values.
  //   ranks: the number of ranks that took part.
  //   moving: the time from the arrival of the last rank to the end of the operation.
  void Ended(Kind kind, uint64_t bytes, size_t ranks, int64_t moving);
  Totals Read();

 private:
  void CloseInput(int64_t end);

  std::mutex mutex_;
  Totals totals_;
  int64_t input_begun_ = 0;
  // The end of the last wait that has been counted. If a later wait overlaps with it, only the rest
  // of the later wait is counted.
  int64_t counted_until_ = 0;
};

// A timeline of this process's activity. It consists of spans, which are named intervals of time.
// Spans are recorded only after a call of Record(true).
class Spans {
 public:
  struct Span {
    std::string lane;
    std::string name;
    int64_t begin;  // in nanoseconds of the steady clock
    int64_t end;
  };

  // Returns the only object of this class. The object is never destroyed, because other threads may
  // still use it while the process exits.
  static Spans& Instance();

  // Removes all spans. From now on, records new spans if `on` is true.
  void Record(bool on);
  bool recording() const { return recording_.load(std::memory_order_relaxed); }
  // Adds a span. Has no effect if spans are not being recorded, or if there are already kMax spans.
  void Add(const char* lane, const char* name, int64_t begin, int64_t end);
  std::vector<Span> Read();

 private:
  static constexpr size_t kMax = 1 << 18;

  std::atomic<bool> recording_{false};
  std::mutex mutex_;
  std::vector<Span> spans_;
};

// Records a span that lasts from the construction of this object to its destruction.
class SpanScope {
 public:
  SpanScope(const char* lane, const char* name);
  ~SpanScope();
  SpanScope(const SpanScope&) = delete;
  SpanScope& operator=(const SpanScope&) = delete;

 private:
  const char* lane_;
  const char* name_;
  int64_t begin_;  // 0 if spans were not being recorded at this time
};

}  // namespace tfdist
