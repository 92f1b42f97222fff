// Writes what the recorders of this process hold to a file, when something has gone wrong.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace tfdist {

// One file per process. It is written at once by a thread of its own, which needs nothing of Python,
// and again when Python has given the stacks of its threads. Every writing is atomic.
class FlightLog {
 public:
  struct Settings {
    std::string path;
    std::string header;  // members of the file's object that tell of this process, as JSON
    std::function<std::string()> communicators;  // an array, as JSON
    std::function<void(const std::string&)> warn;
  };

  // Never destroyed: other threads may come here while the process ends.
  static FlightLog& Instance();

  // Throws Error if there is no descriptor or thread left. Once.
  void Start(Settings settings);
  // Has it written: "error", "stall" (this rank waits), "waited" (others wait for this one) or
  // "signal"; of a communicator, "" for none. Returns at once;
  // without effect before `Start`.
  void Ask(const char* kind, const std::string& communicator, const std::string& message);
  // Of a collective or a message of this rank that has waited for long: what others are to be told
  // of, so that they write their logs as well, those outside of the group included.
  void Stalled(const std::string& communicator, const std::string& message);
  // What has stalled so since the last call; "" for nothing.
  std::string TakeStalled();
  // The same as `Ask` on this signal from now on, after which a handler that was there before runs as well.
  void AskOnSignal(int number);

  // Writes to another path from now on, with another header, and forgets why it was written so far.
  void Move(const std::string& path, const std::string& header);
  // What the exchanges of this process's session have come to, as JSON.
  void SetSession(const std::string& session);
  // A descriptor that can be read whenever stacks are wanted.
  int stacks_wanted() const { return stacks_wanted_; }
  void GiveStacks(const std::string& stacks);
  // Waits until all that was asked for has been written, or for so long.
  void Flush(double seconds);

 private:
  struct Reason {
    int64_t at;
    std::string kind;
    std::string communicator;
    std::string message;
  };

  void Loop();
  std::string Text();
  void WriteFile();

  Settings settings_;
  int process_ = 0;  // a forked child has no thread
  int asked_ = -1;          // an eventfd
  int stacks_wanted_ = -1;  // an eventfd
  std::thread thread_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> started_{false};
  std::vector<Reason> reasons_;
  std::string session_;
  std::string stalled_;
  std::string stacks_;
  uint64_t requests_ = 0;  // so far
  uint64_t written_ = 0;   // of them
  uint64_t stacks_given_ = 0;  // for them
  int last_error_ = 0;     // that has been warned of
};

}  // namespace tfdist
