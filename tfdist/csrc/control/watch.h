// Watches the other ranks over the control connections. Detects lost ranks, stalls, and ranks that
// call different operations. Also measures the differences between the clocks of the hosts.
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

// The current operation of a rank, or its last operation if none is running.
struct Status {
  uint64_t sequence = 0;    // the number of the last collective that the rank has joined
  bool active = false;      // whether the rank is in a collective or a message now
  int32_t peer = -1;        // the other rank of a send or receive
  uint32_t progress = 0;    // changes whenever the rank makes progress
  Fingerprint fingerprint;  // the fingerprint of the current or last operation
};

struct Frame {
  FrameKind kind = FrameKind::kStatus;
  Status status;     // in a status or farewell frame
  int64_t sent = 0;  // in a status frame: the send time on the sender's clock
  // In a status frame: the field `sent` of the last status frame that the sender has received from
  // the receiver, or 0 if it has received none. `echo_received` is the time when that frame
  // arrived, on the sender's clock. With these times, the receiver computes the round-trip time.
  int64_t echoed = 0;
  int64_t echo_received = 0;
  Code code = Code::kUnavailable;  // in an abort frame
  Event event = Event::kOther;     // in an abort or failure frame
  std::string worker;    // in an abort or failure frame: the worker to which the event happened
  uint8_t failures = 0;  // in a failure frame: the number of the sender's failed steps
  // In an abort or failure frame: the message of the error. In a kWaited frame: a warning that the
  // sender waits for the receiver.
  std::string message;
};

std::string Encode(const Frame& frame);

// Assembles frames from a stream of bytes. The reader does not trust the bytes: it checks each
// length before it uses the length, and reads nothing after an invalid frame.
class FrameReader {
 public:
  // Appends bytes to the stream, and calls `use` for each frame that is then complete. Returns
  // false if the stream contains an invalid frame. All later calls then return false as well.
  bool Feed(const char* data, size_t bytes, const std::function<void(const Frame&)>& use);

 private:
  std::string buffer_;
  bool broken_ = false;
};

// The times of two frames, in nanoseconds. This rank sent the first frame at the time `sent`, and
// the other rank received it at the time `received`. The other rank then sent a frame at the time
// `answered`, and this rank received it at the time `came`. `sent` and `came` are times on this
// rank's clock; `received` and `answered` are times on the other rank's clock. Times from decoded
// frames are less than 2^61, so that sums of a few times do not overflow.
struct RoundTrip {
  int64_t sent = 0;
  int64_t received = 0;
  int64_t answered = 0;
  int64_t came = 0;
};

// The offset of another rank's steady clock from this rank's steady clock. It is measured with
// frames in both directions, as in the network time protocol.
//
// Source: Mills, "Internet time synchronization: the network time protocol", 1991. The error of a
// measured offset is at most half of the time that the two frames spend in transit. The measurement
// with the smallest error is kept. The error of an old measurement grows over time, since the
// clocks may drift.
class ClockOffset {
 public:
  bool measured() const { return measured_; }
  int64_t offset() const { return offset_; }
  // Returns the maximum error of the offset. `now` is the current time on this rank's clock.
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

// The transit times of the frames from another rank. A transit time is the difference between the
// send time on that rank's clock and the arrival time on this rank's clock. Frames and data wait in
// the same queues of the network, so long transit times show that data is queued.
class OneWayDelay {
 public:
  int64_t frames() const { return frames_; }
  int64_t nanoseconds() const { return nanoseconds_; }  // sum over all frames

  // Adds a frame that was sent at the time `sent` on the other rank's clock, and that arrived at
  // the time `came` on this rank's clock.
  void Add(int64_t sent, int64_t came, const ClockOffset& clock) {
    if (!clock.measured() || sent == 0) return;
    // Each time is halved first, so that no value that a peer sends can cause an overflow.
    const int64_t delay = came / 2 - sent / 2 + clock.offset() / 2;
    ++frames_;
    nanoseconds_ += 2 * std::clamp<int64_t>(delay, 0, kMax / 2);
  }

 private:
  static constexpr int64_t kMax = 60'000'000'000;  // the maximum delay that counts for one frame

  int64_t frames_ = 0;
  int64_t nanoseconds_ = 0;
};

using Clock = std::chrono::steady_clock;

// What this rank is doing: its current operation, the time when this operation began, and the time
// when the group last made progress.
struct Doing {
  Status status;
  Clock::time_point since;
  Clock::time_point progress;
};

// Watches the other ranks of a group in a separate thread, and sends them the status of this rank.
class Watch {
 public:
  struct Settings {
    int rank = 0;
    std::vector<std::string> names;  // for each rank
    double silence_warning_seconds = 5;
    double silence_timeout_seconds = 60;
    double stall_seconds = 30;
    double timeout_seconds = 600;
    // The maximum time that `Stop` waits until the other ranks have received the farewells.
    double parting_seconds = 0.2;
  };
  struct Callbacks {
    std::function<Doing()> doing;
    // Sets `*joined` to the fingerprint of the collective with the number `sequence`, which this
    // rank has joined. Returns false if the collective is not one of the most recent ones.
    std::function<bool(uint64_t sequence, Fingerprint* joined)> joined;
    // Returns whether this rank has begun its own side of a message: the receive if `rank` sends
    // the message, or the send if `rank` receives it.
    std::function<bool(int rank, const Fingerprint& message)> has_handled;
    std::function<void()> progress;  // called when another rank has made progress
    std::function<void(const Error& cause)> give_up;
    std::function<void(const std::string& message)> warn;
    // Called with the text of each warning about a stall.
    std::function<void(const std::string& message)> stalled;
    // Called with the report when another rank reports that it waits for this rank.
    std::function<void(const std::string& message)> waited_for;
    std::function<void()> tick;  // called periodically
  };

  // Returns the interval between a rank's status frames during a long operation. The interval
  // depends on `ranks`, the number of ranks in the group.
  static double SlowStatusSeconds(size_t ranks);

  // Args: streams: for each rank, the control connection to it; null for the rank of this process.
  Watch(Settings settings, Streams streams, Callbacks callbacks);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  void Start();
  // Sends frames to all other ranks. May be called from any thread.
  void Tell(const std::vector<Frame>& frames);
  // Sends farewells to the other ranks, stops the thread, and closes the streams.
  void Stop();

  // What this rank knows about another rank from the control connection. Times are in nanoseconds
  // of the steady clock.
  struct Known {
    int rank = 0;
    Status status;
    int64_t heard = 0;
    bool left = false;
    bool lost = false;
    ClockOffset clock;
    OneWayDelay delay;
  };
  // Returns the states of all other ranks. May be called from any thread.
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
  std::vector<std::unique_ptr<Peer>> peers_;  // only the thread uses the streams
  std::mutex known_mutex_;                    // guards the state that `Others` reads
  int wake_;                                  // an eventfd
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  std::mutex telling_mutex_;
  std::string told_;  // encoded frames that the thread will send
  // The start of the wait for which `next_warning_` has been computed.
  Clock::time_point warned_for_;
  double next_warning_ = 0;
};

}  // namespace tfdist
