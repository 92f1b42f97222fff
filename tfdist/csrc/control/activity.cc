#include "control/activity.h"

#include <algorithm>
#include <utility>

namespace tfdist {

int64_t Nanoseconds(std::chrono::steady_clock::time_point when) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(when.time_since_epoch()).count();
}

namespace {

// Returns the bus factor of a collective: the number of bytes that each link must carry if the best
// algorithm is used, divided by the size of the operation. nccl-tests computes the bus bandwidth
// with the same factors.
double BusFactor(Kind kind, double ranks) {
  switch (kind) {
    case Kind::kAllReduce:
      return 2 * (ranks - 1) / ranks;
    case Kind::kReduceScatter:
    case Kind::kAllGather:
    case Kind::kAllToAll:
      return (ranks - 1) / ranks;
    case Kind::kBroadcast:
    case Kind::kSend:
    case Kind::kReceive:
      return 1;
    case Kind::kBarrier:
      return 0;
  }
  return 0;
}

}  // namespace

Activity& Activity::Instance() {
  static Activity* const activity = new Activity;
  return *activity;
}

void Activity::CloseInput(int64_t end) {
  if (!input_begun_) return;
  const int64_t begin = std::max(std::exchange(input_begun_, 0), counted_until_);
  if (end <= begin) return;
  totals_.input += end - begin;
  counted_until_ = end;
  Spans::Instance().Add("input", "input", begin, end);
}

void Activity::InputBegins() {
  const int64_t now = Nanoseconds();
  const std::lock_guard<std::mutex> lock(mutex_);
  input_begun_ = now;
}

void Activity::InputEnds() {
  const int64_t now = Nanoseconds();
  const std::lock_guard<std::mutex> lock(mutex_);
  ++totals_.steps;
  CloseInput(now);
}

void Activity::Stalled(int64_t begin, int64_t arrived, int64_t end) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // The step began to wait for its input before this stall began. It must have received the input
  // in the meantime, even if `InputEnds` has not been called yet.
  if (begin > input_begun_) CloseInput(begin);
  begin = std::max(begin, counted_until_);
  if (end <= begin) return;
  arrived = std::min(std::max(arrived, begin), end);
  totals_.waiting += arrived - begin;
  totals_.moving += end - arrived;
  if (arrived > begin) Spans::Instance().Add("waiting", "workers", begin, arrived);
  if (end > arrived) Spans::Instance().Add("waiting", "network", arrived, end);
  counted_until_ = end;
}

void Activity::Ended(Kind kind, uint64_t bytes, size_t ranks, int64_t moving) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++totals_.operations[static_cast<size_t>(kind)];
  totals_.bus_bytes += static_cast<double>(bytes) * BusFactor(kind, static_cast<double>(ranks));
  totals_.bus_moving += moving;
}

Activity::Totals Activity::Read() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Totals totals = totals_;
  totals.input_since = input_begun_;
  return totals;
}

Spans& Spans::Instance() {
  static Spans* const spans = new Spans;
  return *spans;
}

void Spans::Record(bool on) {
  const std::lock_guard<std::mutex> lock(mutex_);
  spans_.clear();
  recording_ = on;
}

void Spans::Add(const char* lane, const char* name, int64_t begin, int64_t end) {
  if (!recording()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (spans_.size() < kMax) spans_.push_back({lane, name, begin, end});
}

std::vector<Spans::Span> Spans::Read() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return spans_;
}

SpanScope::SpanScope(const char* lane, const char* name)
    : lane_(lane), name_(name), begin_(Spans::Instance().recording() ? Nanoseconds() : 0) {}

SpanScope::~SpanScope() {
  if (begin_) Spans::Instance().Add(lane_, name_, begin_, Nanoseconds());
}

}  // namespace tfdist
