// Watches over the other ranks of a group: who lives, who waits for whom, who has given up.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "control/clock_offset.h"
#include "control/frames.h"
#include "tls/streams.h"

namespace tfdist {

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
    std::function<void(const std::string& message)> stalled;    // beside a warning
    std::function<void(const std::string& message)> waited_for;  // another rank has warned so
    std::function<void()> tick;  // called again and again
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
  int wake_;  // an eventfd
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  std::mutex telling_mutex_;
  std::string told_;  // frames to be sent
  Clock::time_point warned_for_;  // when the patience began that warnings were given for
  double next_warning_ = 0;
};

}  // namespace tfdist
