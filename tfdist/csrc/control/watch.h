// The watch over the other ranks: frames on control connections, liveness, order, stalls, clocks.
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

// The kinds of messages on control connections.
enum class FrameKind : uint8_t {
  kStatus = 1,
  kAbort = 2,
  kFarewell = 3,
  kFailure = 4,
  kWaited = 5
};

// The current operation of a rank.
struct Status {
  uint64_t sequence = 0;    // of the last collective that it has joined
  bool active = false;      // in a collective or a message right now
  int32_t peer = -1;        // of a message
  uint32_t progress = 0;    // changes whenever the rank makes progress
  Fingerprint fingerprint;  // of the current operation
};

struct Frame {
  FrameKind kind = FrameKind::kStatus;
  Status status;                   // of a status or a farewell
  int64_t sent = 0;                // send time, by the sender's clock; of a status
  int64_t echoed = 0;              // `sent` of the receiver's last status; 0 for none
  int64_t echo_received = 0;       // when that status arrived
  Code code = Code::kUnavailable;  // of an abort
  Event event = Event::kOther;     // of an abort or a failure
  std::string worker;              // of an abort or a failure: the worker of the event
  uint8_t failures = 0;            // of a failure: failed steps, including this one
  std::string message;             // of an abort, of a failure, or about a wait for the receiver
};

std::string Encode(const Frame& frame);

// Assembles frames from a byte stream. It trusts no byte: it checks each length before use, and
// ends the stream at anything that is not a frame.
class FrameReader {
 public:
  // Calls `use` for every complete frame. Returns false, permanently, after malformed input.
  bool Feed(const char* data, size_t bytes, const std::function<void(const Frame&)>& use);

 private:
  std::string buffer_;
  bool broken_ = false;
};

// The four times of two frames, in nanoseconds. This rank sent a frame at `sent`. The other rank
// received the frame at `received` and sent its next frame at `answered`, both by its own clock.
// That frame arrived here at `came`. Times in a decoded frame are below 2^61.
struct RoundTrip {
  int64_t sent = 0;
  int64_t received = 0;
  int64_t answered = 0;
  int64_t came = 0;
};

// The offset of another rank's steady clock from this one's, measured from frames in both
// directions.
//
// Source: Mills, "Internet time synchronization: the network time protocol", 1991. The error of a
// measured offset is at most half of the transmission time. The measurement with the smallest error
// is kept. Its error grows over time, since the clocks may drift.
class ClockOffset {
 public:
  bool measured() const { return measured_; }
  int64_t offset() const { return offset_; }
  // The maximum error of the offset at a time of this rank's clock.
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
    // Halved first to avoid overflow: a peer may send any value.
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

// The transmission times of another rank's frames: from the send time by that rank's clock to the
// arrival by this rank's clock. Frames wait in the network's queues together with data.
class OneWayDelay {
 public:
  int64_t frames() const { return frames_; }
  int64_t nanoseconds() const { return nanoseconds_; }  // sum over all frames

  // Adds a frame, given its send time by the peer's clock and its arrival time by this rank's
  // clock.
  void Add(int64_t sent, int64_t came, const ClockOffset& clock) {
    if (!clock.measured() || sent == 0) return;
    // Halved to avoid overflow: a peer may send any value.
    const int64_t delay = came / 2 - sent / 2 + clock.offset() / 2;
    ++frames_;
    nanoseconds_ += 2 * std::clamp<int64_t>(delay, 0, kMax / 2);
  }

 private:
  static constexpr int64_t kMax = 60'000'000'000;  // limit for one frame

  int64_t frames_ = 0;
  int64_t nanoseconds_ = 0;
};

using Clock = std::chrono::steady_clock;

// A rank's current operation and its start, and the last progress of the group.
struct Doing {
  Status status;
  Clock::time_point since;
  Clock::time_point progress;
};

// Watches the other ranks of a group in a thread, and informs them about this one.
class Watch {
 public:
  struct Settings {
    int rank = 0;
    std::vector<std::string> names;  // per rank
    double silence_warning_seconds = 5;
    double silence_timeout_seconds = 60;
    double stall_seconds = 30;
    double timeout_seconds = 600;
    double parting_seconds = 0.2;  // time limit for the arrival of farewells
  };
  struct Callbacks {
    std::function<Doing()> doing;
    // Gets the fingerprint with which this rank joined a collective. Returns false if the
    // collective is not one of the most recent ones.
    std::function<bool(uint64_t sequence, Fingerprint* joined)> joined;
    // Whether this rank has begun its side of a message from or to `rank`.
    std::function<bool(int rank, const Fingerprint& message)> has_handled;
    std::function<void()> progress;  // called when another rank has made progress
    std::function<void(const Error& cause)> give_up;
    std::function<void(const std::string& message)> warn;
    std::function<void(const std::string& message)> stalled;     // after each warning of a stall
    std::function<void(const std::string& message)> waited_for;  // when another rank reports a wait
    std::function<void()> tick;                                  // called periodically
  };

  // The interval of status frames during a long operation, for a group of `ranks` ranks.
  static double SlowStatusSeconds(size_t ranks);

  // Takes a stream for each rank except this one.
  Watch(Settings settings, Streams streams, Callbacks callbacks);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  void Start();
  // Sends frames to the other ranks; may be called from any thread.
  void Tell(const std::vector<Frame>& frames);
  // Sends farewells, stops the thread, and closes the streams.
  void Stop();

  // The state of a rank as seen over its control connection. Times are nanoseconds of the steady
  // clock.
  struct Known {
    int rank = 0;
    Status status;
    int64_t heard = 0;
    bool left = false;
    bool lost = false;
    ClockOffset clock;
    OneWayDelay delay;
  };
  // Returns the state of each other rank; may be called from any thread.
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
  std::vector<std::unique_ptr<Peer>> peers_;  // their streams are used only by the thread
  std::mutex known_mutex_;                    // guards the state that `Others` reads
  int wake_;                                  // an eventfd
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  std::mutex telling_mutex_;
  std::string told_;              // frames to send
  Clock::time_point warned_for_;  // start of the wait to which `next_warning_` applies
  double next_warning_ = 0;
};

}  // namespace tfdist
