#include "control/recorder.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

namespace tfdist {
namespace {

template <typename T>
void Set(std::atomic<T>* value, T to) {
  value->store(to, std::memory_order_relaxed);
}

template <typename T>
T Get(const std::atomic<T>& value) {
  return value.load(std::memory_order_relaxed);
}

}  // namespace

void Recorder::Changing::Clear() {
  Set<uint8_t>(&algorithm, 0);
  Set(&last, -1);
  for (auto* time : {&last_arrived, &between_begun, &between_ended, &coding}) Set<int64_t>(time, 0);
}

void Recorder::Changing::CopyTo(Record* record) const {
  record->algorithm = Get(algorithm);
  record->last = Get(last);
  record->last_arrived = Get(last_arrived);
  record->between_begun = Get(between_begun);
  record->between_ended = Get(between_ended);
  record->coding = Get(coding);
}

uint64_t HashOf(const Fingerprint& fingerprint) {
  const size_t length = strnlen(fingerprint.name, sizeof(fingerprint.name));
  return std::hash<std::string_view>()({fingerprint.name, length}) | 1;
}

Recorder::Recorder(const std::vector<int>& host_of)
    : host_of_(host_of),
      hosts_(1 + static_cast<size_t>(*std::max_element(host_of_.begin(), host_of_.end()))),
      records_(kRecords),
      arrivals_(kRecords * hosts_),
      seen_(host_of.size()) {}

void Recorder::Ready(uint64_t name, bool stalls) {
  if (!recording_.load(std::memory_order_relaxed)) return;
  const int64_t now = Nanoseconds();
  const std::lock_guard<std::mutex> lock(mutex_);
  marks_[marked_++ % kMarks] = {name, now};
  if (!stalls) {
    ++overlapping_;
  } else if (!stalled_since_) {
    stalled_since_ = now;
  }
}

void Recorder::Stalls() {
  if (!recording_.load(std::memory_order_relaxed)) return;
  const int64_t now = Nanoseconds();
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool overlaps = open_ && !stalls_;
  if (!overlaps && !overlapping_) return;
  (overlaps ? stalls_ : next_stalls_) = true;
  if (!stalled_since_) stalled_since_ = now;
}

void Recorder::Forget() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ForgetLocked();
}

void Recorder::ForgetLocked() {
  marked_ = 0;
  overlapping_ = 0;
  next_stalls_ = false;
  // Whoever waits for an operation that still runs goes on waiting.
  if (!open_) stalled_since_ = 0;
}

void Recorder::Begin(const Fingerprint& fingerprint, const Beginning& beginning) {
  if (!recording_.load(std::memory_order_relaxed)) return;
  const int64_t now = Nanoseconds();
  const std::lock_guard<std::mutex> lock(mutex_);
  Record& record = current();
  record = {};
  record.fingerprint = fingerprint;
  record.number = written_ + 1;
  record.bytes = beginning.bytes;
  record.peer = beginning.peer;
  record.enqueued = beginning.enqueued;
  record.begun = looked_ = now;
  if (marked_) {
    const uint64_t name = HashOf(fingerprint);
    for (size_t i = 0; i < std::min(marked_, kMarks); ++i) {
      if (marks_[i].name != name) continue;
      record.enqueued = std::min(record.enqueued, marks_[i].at);
      marks_[i].name = 0;
    }
  }
  changing_.Clear();
  for (size_t host = 0; host < hosts_; ++host) Set(&arrivals()[host], 0u);
  stalls_ = beginning.stalls;
  if (!stalls_ && overlapping_) {
    --overlapping_;
    stalls_ = std::exchange(next_stalls_, false);
  }
  if (stalls_ && !stalled_since_) stalled_since_ = record.enqueued;
  open_ = true;
}

void Recorder::Chose(uint8_t algorithm) { Set(&changing_.algorithm, algorithm); }

void Recorder::BetweenHosts(bool begins) {
  Set(begins ? &changing_.between_begun : &changing_.between_ended, Nanoseconds());
}

void Recorder::Coded(int64_t duration) {
  Set(&changing_.coding, Get(changing_.coding) + duration);
}

void Recorder::Arrived(int rank, bool waited) {
  // Only this thread writes these.
  if (!open_) return;
  uint64_t& seen = seen_[static_cast<size_t>(rank)];
  if (seen == written_ + 1) return;
  seen = written_ + 1;
  std::atomic<uint32_t>& arrival = arrivals()[host_of_[static_cast<size_t>(rank)]];
  const bool first = Get(arrival) == 0;
  if (waited) looked_ = Nanoseconds();
  if (first) {
    constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();
    const int64_t microseconds = (looked_ - current().begun) / 1000 + 1;
    Set(&arrival, static_cast<uint32_t>(std::min(microseconds, kMost)));
  }
  if (!waited) return;
  Set(&changing_.last, rank);
  Set(&changing_.last_arrived, looked_);
}

void Recorder::End(bool failed, uint64_t bytes) {
  const int64_t now = Nanoseconds();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!open_) return;
  Record& record = current();
  changing_.CopyTo(&record);
  record.failed = failed;
  record.bytes = std::max(record.bytes, bytes);
  record.ended = now;
  open_ = false;
  ++written_;
  const int64_t arrived = std::max(record.begun, record.last_arrived);
  if (stalled_since_) {
    Activity::Instance().Stalled(std::max(stalled_since_, record.begun), arrived, now);
  }
  if (failed) return ForgetLocked();
  if (stalls_) stalled_since_ = 0;
  Activity::Instance().Ended(record.fingerprint.kind, record.bytes, participants_, now - arrived);
}

Recorder::Log Recorder::Read(size_t most, int64_t since) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Log log;
  const uint64_t end = written_ + (open_ ? 1 : 0);
  for (uint64_t i = end - std::min<uint64_t>(end, std::min(most, kRecords)); i < end; ++i) {
    const size_t at = i % kRecords;
    const Record& record = records_[at];
    if (record.ended && record.ended < since) continue;
    log.records.push_back(record);
    if (i == written_) changing_.CopyTo(&log.records.back());
    std::vector<int64_t> arrivals;
    arrivals.reserve(hosts_);
    for (size_t host = 0; host < hosts_; ++host) {
      const uint32_t arrival = Get(arrivals_[at * hosts_ + host]);
      arrivals.push_back(static_cast<int64_t>(arrival) - 1);
    }
    log.arrivals.push_back(std::move(arrivals));
  }
  return log;
}

}  // namespace tfdist
