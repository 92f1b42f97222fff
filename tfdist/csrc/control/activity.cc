#include "control/activity.h"

#include <algorithm>

namespace tfdist {

int64_t Nanoseconds(std::chrono::steady_clock::time_point when) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(when.time_since_epoch()).count();
}

Activity& Activity::Instance() {
  static Activity* const activity = new Activity;
  return *activity;
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
  if (input_begun_) totals_.input += now - input_begun_;
  input_begun_ = 0;
}

void Activity::Stalled(int64_t begin, int64_t arrived, int64_t end) {
  const std::lock_guard<std::mutex> lock(mutex_);
  begin = std::max(begin, counted_until_);
  if (end <= begin) return;
  arrived = std::min(std::max(arrived, begin), end);
  totals_.waiting += arrived - begin;
  totals_.moving += end - arrived;
  counted_until_ = end;
}

void Activity::Ended(Kind kind) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++totals_.operations[static_cast<size_t>(kind)];
}

Activity::Totals Activity::Read() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return totals_;
}

}  // namespace tfdist
