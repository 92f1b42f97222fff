// Watches the other ranks over control connections: frames, and the clocks of peers.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "error.h"
#include "tls/tls_stream.h"
#include "types.h"

namespace tfdist {

// What ranks tell each other beside the data: that they live, where they are, why they give up.
enum class FrameKind : uint8_t {
  kStatus = 1,
  kAbort = 2,
  kFarewell = 3,
  kFailure = 4,
  kWaited = 5
};

// Where a rank is.
struct Status {
  uint64_t sequence = 0;    // of the last collective of the group that it has joined
  bool active = false;      // whether it is in a collective or a message right now
  int32_t peer = -1;        // of a message
  uint32_t progress = 0;    // a number that changes whenever the rank makes progress
  Fingerprint fingerprint;  // of what it is in
};

struct Frame {
  FrameKind kind = FrameKind::kStatus;
  Status status;              // of a status or a farewell
  int64_t sent = 0;           // when, by the sender's clock; of a status
  int64_t echoed = 0;         // the time in the last status from whom this one goes to; 0 for none
  int64_t echo_received = 0;  // when that came
  Code code = Code::kUnavailable;  // of an abort
  uint8_t failures = 0;            // of a failure: steps that have failed, this one counted
  std::string message;             // of an abort, a failure, or what the receiver is waited for in
};

std::string Encode(const Frame& frame);

// Puts frames together from bytes as they come. Trusts nothing: a length is bounded before it is
// believed, and whatever is not a frame ends the stream.
class FrameReader {
 public:
  // Calls `use` for every frame that is complete. Returns false, for good, on anything else.
  bool Feed(const char* data, size_t bytes, const std::function<void(const Frame&)>& use);

 private:
  std::string buffer_;
  bool broken_ = false;
};

// How far another rank's steady clock is ahead of this one's, from frames that go both ways.
//
// Four times of two frames, in nanoseconds: this rank has sent one at `sent`, the other has
// received it at `received` and sent the next at `answered`, by its own clock, which came at
// `came`. What a frame lets through is below 2^61.
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

// Watches over the other ranks of a group: who lives, who waits for whom, who has given up.

using Clock = std::chrono::steady_clock;

// What a rank is in, and since when; and when the group was last seen to make progress.
struct Doing {
  Status status;
  Clock::time_point since;
  Clock::time_point progress;
};

class Watch {
 public:
  struct Settings {
    int rank = 0;
    std::vector<std::string> names;  // for each rank
    double silence_warning_seconds = 5;
    double silence_timeout_seconds = 60;
    double stall_seconds = 30;
    double timeout_seconds = 600;
    double parting_seconds = 0.2;  // how long the farewells may take to arrive
  };
  struct Callbacks {
    std::function<Doing()> doing;
    // What this rank was in when it joined a collective by its number, if that was not long ago.
    std::function<bool(uint64_t sequence, Fingerprint* joined)> joined;
    // Whether this rank has begun its side of a message that a rank sends to it or receives.
    std::function<bool(int rank, const Fingerprint& message)> has_handled;
    std::function<void()> progress;  // of another rank
    std::function<void(Code code, const std::string& message)> give_up;
    std::function<void(const std::string& message)> warn;
    std::function<void(const std::string& message)> stalled;     // beside a warning
    std::function<void(const std::string& message)> waited_for;  // another rank has warned so
    std::function<void()> tick;                                  // called again and again
  };

  // How often a rank of so many tells the others of itself while an operation takes long.
  static double SlowStatusSeconds(size_t ranks);

  // For each rank a stream, none for this one.
  Watch(Settings settings, Streams streams, Callbacks callbacks);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  void Start();
  // Tells the others something, from any thread.
  void Tell(const std::vector<Frame>& frames);
  // Says farewell, stops the thread, closes the streams.
  void Stop();

  // What is known of a rank by its control connection. Times are nanoseconds of the steady clock.
  struct Known {
    int rank = 0;
    Status status;
    int64_t heard = 0;
    bool left = false;
    bool lost = false;
    ClockOffset clock;
    OneWayDelay delay;
  };
  // Of each other rank, from any thread.
  std::vector<Known> Others();

 private:
  struct Peer;

  void Loop();
  void Part();
  void Read(int rank);
  void Handle(int rank, const Frame& frame);
  void Drain(Peer& peer);
  void Send(Peer& peer, const std::string& bytes);
  void SendStatus(Frame frame);
  void SetHeard(Peer& peer, Clock::time_point when);
  void Lose(int rank, const std::string& why);
  void CheckSilence(Clock::time_point now);
  void CheckOrder(const Doing& doing, Clock::time_point now);
  void CheckStall(const Doing& doing, Clock::time_point now);
  std::vector<int> Missing(const Doing& doing) const;
  std::string Names(const std::vector<int>& ranks) const;
  void WakeUp();

  const Settings settings_;
  const Callbacks callbacks_;
  std::vector<std::unique_ptr<Peer>> peers_;  // their streams belong to the thread
  std::mutex known_mutex_;                    // of what `Others` reads of them
  int wake_;                                  // an eventfd
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  std::mutex telling_mutex_;
  std::string told_;              // frames to be sent
  Clock::time_point warned_for_;  // when the patience began that warnings were given for
  double next_warning_ = 0;
};

}  // namespace tfdist
