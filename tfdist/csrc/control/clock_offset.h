// How far another rank's steady clock is ahead of this one's, from frames that go both ways.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tfdist {

// Four times of two frames, in nanoseconds: this rank has sent one at `sent`, the other has received
// it at `received` and sent the next at `answered`, by its own clock, which came at `came`. What a
// frame lets through is below 2^61.
struct RoundTrip {
  int64_t sent = 0;
  int64_t received = 0;
  int64_t answered = 0;
  int64_t came = 0;
};

// The estimate of Mills, "Internet time synchronization: the network time protocol" (1991): the
// offset that a round trip shows is wrong by half of the time on the way at most. The shortest one
// counts, until clocks may have drifted apart further than a newer one is wrong.
class ClockOffset {
 public:
  bool measured() const { return measured_; }
  int64_t offset() const { return offset_; }
  // How wrong the offset may be at a time of this rank's clock.
  int64_t uncertainty(int64_t now) const {
    return uncertainty_ + (now > at_ ? (now - at_) / kTicksPerDrift : 0);
  }

  void Add(const RoundTrip& trip) {
    const int64_t on_the_way = (trip.came - trip.sent) - (trip.answered - trip.received);
    if (trip.sent == 0 || trip.received == 0 || trip.answered == 0) return;
    if (trip.sent > trip.came || on_the_way < 0) return;
    const int64_t wrong = on_the_way / 2 + (trip.came - trip.sent) / kTicksPerDrift;
    if (measured_ && wrong > uncertainty(trip.came)) return;
    measured_ = true;
    // Halves first: what a peer sends may be anything.
    offset_ = (trip.received / 2 - trip.sent / 2) + (trip.answered / 2 - trip.came / 2);
    uncertainty_ = wrong;
    at_ = trip.came;
  }

 private:
  static constexpr int64_t kTicksPerDrift = 20000;  // 50 ppm

  bool measured_ = false;
  int64_t offset_ = 0;
  int64_t uncertainty_ = 0;
  int64_t at_ = 0;
};

// How long frames from another rank were on their way, by its clock and this one's: where data
// queues, they wait with it.
class OneWayDelay {
 public:
  int64_t frames() const { return frames_; }
  int64_t nanoseconds() const { return nanoseconds_; }  // of all of them together

  // A frame that was sent at one time, by the other's clock, and came at another, by this one's.
  void Add(int64_t sent, int64_t came, const ClockOffset& clock) {
    if (!clock.measured() || sent == 0) return;
    // Halves: what a peer sends may be anything.
    const int64_t delay = came / 2 - sent / 2 + clock.offset() / 2;
    ++frames_;
    nanoseconds_ += 2 * std::clamp<int64_t>(delay, 0, kMost / 2);
  }

 private:
  static constexpr int64_t kMost = 60'000'000'000;  // of one frame

  int64_t frames_ = 0;
  int64_t nanoseconds_ = 0;
};

}  // namespace tfdist
