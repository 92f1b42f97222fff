#include "control/spans.h"

#include "control/activity.h"

namespace tfdist {

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
  if (spans_.size() < kMost) spans_.push_back({lane, name, begin, end});
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
