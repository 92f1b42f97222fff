// Watches the other ranks over the control connections: detects lost ranks, stalls, and ranks that
// call different operations, and measures the differences between the hosts' clocks.
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

// The kinds of frames on control connections.
enum class FrameKind : uint8_t {
  kStatus = 1,
  kAbort = 2,
  kFarewell = 3,
  kFailure = 4,
  kWaited = 5
};

// The current operation of a rank, or its last one.
struct Status {
  uint64_t sequence = 0;    // number of the last collective that the rank has joined
  bool active = false;      // whether the rank is in a collective or a message now
  int32_t peer = -1;        // if the operation is a message, the other rank
  uint32_t progress = 0;    // changes whenever the rank makes progress
  Fingerprint fingerprint;  // fingerprint of the current or last operation
};

struct Frame {
  FrameKind kind = FrameKind::kStatus;
  Status status;     // for a status or a farewell
  int64_t sent = 0;  // for a status: the send time on the sender's clock
  // For a status: the field `sent` of the last status that the sender has received from the
  // receiver, or 0 if there is none. `echo_received` is the time when that status arrived, on the
  // sender's clock.
  int64_t echoed = 0;
  int64_t echo_received = 0;
  Code code = Code::kUnavailable;  // for an abort
  Event event = Event::kOther;     // for an abort or a failure
  std::string worker;    // for an abort or a failure: the worker to which the event happened
  uint8_t failures = 0;  // for a failure: the sender's number of failed steps
  // For an abort or a failure: the message of the error. For kWaited: a warning that the sender
  // waits for the receiver.
  std::string message;
};

std::string Encode(const Frame& frame);

// Assembles frames from a stream of bytes. The bytes are not trusted: each length is checked before
// it is used, and nothing is read after an invalid frame.
class FrameReader {
 public:
  // Calls `use` for each complete frame. Returns false if the input is malformed; all later calls
  // then return false as well.
  bool Feed(const char* data, size_t bytes, const std::function<void(const Frame&)>& use);

 private:
  std::string buffer_;
  bool broken_ = false;
};

// The times of two frames, in nanoseconds. This rank sent the first frame at the time `sent`, and
// the other rank received it at the time `received`. The other rank then sent a frame at the time
// `answered`, and this rank received it at the time `came`. `sent` and `came` are times on this
// rank's clock; `received` and `answered` are times on the other rank's clock. All times from
// decoded frames are below 2^61.
struct RoundTrip {
  int64_t sent = 0;
  int64_t received = 0;
  int64_t answered = 0;
  int64_t came = 0;
};

// The offset of another rank's steady clock from this rank's steady clock, measured with frames in
// both directions.
//
// Source: Mills, "Internet time synchronization: the network time protocol", 1991. The error of a
// measured offset is at most half of the time that the two frames spend in transit. The measurement
// with the smallest error is kept. Its error grows over time, since the clocks may drift.
class ClockOffset {
 public:
  bool measured() const { return measured_; }
  int64_t offset() const { return offset_; }
  // Returns the maximum error of the offset at the time `now` on this rank's clock.
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
    // Each time is halved first, so that no value that a peer sends can cause an overflow.
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

// The transmission times of another rank's frames, from the send time on that rank's clock to the
// arrival time on this rank's clock. Frames wait in the same queues of the network as data.
class OneWayDelay {
 public:
  int64_t frames() const { return frames_; }
  int64_t nanoseconds() const { return nanoseconds_; }  // sum over all frames

  // Adds a frame. `sent` is its send time on the other rank's clock, and `came` is its arrival time
  // on this rank's clock.
  void Add(int64_t sent, int64_t came, const ClockOffset& clock) {
    if (!clock.measured() || sent == 0) return;
    // Each time is halved first, so that no value that a peer sends can cause an overflow.
    const int64_t delay = came / 2 - sent / 2 + clock.offset() / 2;
    ++frames_;
    nanoseconds_ += 2 * std::clamp<int64_t>(delay, 0, kMax / 2);
  }

 private:
  static constexpr int64_t kMax = 60'000'000'000;  // maximum delay of one frame

  int64_t frames_ = 0;
  int64_t nanoseconds_ = 0;
};

using Clock = std::chrono::steady_clock;

// This rank's current operation, the time when it began, and the time of the group's last progress.
struct Doing {
  Status status;
  Clock::time_point since;
  Clock::time_point progress;
};

// Watches the other ranks of a group in a separate thread, and informs them about this rank.
class Watch {
 public:
  struct Settings {
    int rank = 0;
    std::vector<std::string> names;  // per rank
    double silence_warning_seconds = 5;
    double silence_timeout_seconds = 60;
    double stall_seconds = 30;
    double timeout_seconds = 600;
    double parting_seconds = 0.2;  // maximum time to wait until the farewells have arrived
  };
  struct Callbacks {
    std::function<Doing()> doing;
    // Gets the fingerprint of the collective number `sequence` that this rank has joined. Returns
    // false if the collective is not one of the most recent ones.
    std::function<bool(uint64_t sequence, Fingerprint* joined)> joined;
    // Returns whether this rank has begun its own side of a message that `rank` sends or receives.
    std::function<bool(int rank, const Fingerprint& message)> has_handled;
    std::function<void()> progress;  // called when another rank has made progress
    std::function<void(const Error& cause)> give_up;
    std::function<void(const std::string& message)> warn;
    // Called after each warning about a stall.
    std::function<void(const std::string& message)> stalled;
    // Called when another rank reports that it waits for this rank.
    std::function<void(const std::string& message)> waited_for;
    std::function<void()> tick;  // called periodically
  };

  // Returns the interval between status frames during a long operation, in a group of `ranks`
  // ranks.
  static double SlowStatusSeconds(size_t ranks);

  // Args: streams: a control connection to each rank; null for this rank.
  Watch(Settings settings, Streams streams, Callbacks callbacks);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  void Start();
  // Sends frames to all other ranks. May be called from any thread.
  void Tell(const std::vector<Frame>& frames);
  // Sends farewells to the other ranks, stops the thread, and closes the streams.
  void Stop();

  // The state of another rank, as this rank knows it from the control connection. Times are
  // nanoseconds of the steady clock.
  struct Known {
    int rank = 0;
    Status status;
    int64_t heard = 0;
    bool left = false;
    bool lost = false;
    ClockOffset clock;
    OneWayDelay delay;
  };
  // Returns the state of each other rank. May be called from any thread.
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
  void Lose(int rank, Event event, const std::string& why);
  void CheckSilence(Clock::time_point now);
  void CheckOrder(const Doing& doing, Clock::time_point now);
  void CheckStall(const Doing& doing, Clock::time_point now);
  std::vector<int> Missing(const Doing& doing) const;
  std::string Names(const std::vector<int>& ranks) const;
  void WakeUp();

  const Settings settings_;
  const Callbacks callbacks_;
  std::vector<std::unique_ptr<Peer>> peers_;  // only the thread uses their streams
  std::mutex known_mutex_;                    // guards the state that `Others` reads
  int wake_;                                  // an eventfd
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  std::mutex telling_mutex_;
  std::string told_;              // frames to send
  Clock::time_point warned_for_;  // start of the wait for which `next_warning_` is valid
  double next_warning_ = 0;
};

}  // namespace tfdist
