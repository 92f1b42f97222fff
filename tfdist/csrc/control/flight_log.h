// The flight log: a file of recent operations, which a reader can open after a crash.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "control/activity.h"
#include "types.h"

namespace tfdist {

// A flight recorder: the last collectives and messages of a communicator, as they went on this
// rank.
//
// One collective or message. Times are nanoseconds of the steady clock; 0 where it has not
// happened.
struct Record {
  Fingerprint fingerprint;
  uint64_t number = 0;    // among all of the communicator, from 1
  uint64_t bytes = 0;     // of what this rank gives or gets, whichever is more
  int32_t peer = -1;      // of a message
  int32_t last = -1;      // the rank that this one has waited for last; -1 if for none
  uint8_t algorithm = 0;  // that an all-reduce ran by
  bool failed = false;
  int64_t enqueued = 0;
  int64_t begun = 0;
  int64_t last_arrived = 0;
  int64_t ended = 0;
  int64_t between_begun = 0;  // of a hierarchical all-reduce, the part between the hosts
  int64_t between_ended = 0;
  int64_t coding = 0;  // how long compression has taken of it
};

class Recorder {
 public:
  static constexpr size_t kRecords = 1024;

  // For each rank, an index of its host.
  explicit Recorder(const std::vector<int>& host_of);

  // How many take part in a collective, if that is not one for each rank.
  void SetParticipants(size_t participants) { participants_ = participants; }

  // Whether all recorders of this process record the operations that begin from now on. They do,
  // unless somebody measures what that costs.
  static void SetRecording(bool on) { recording_.store(on, std::memory_order_relaxed); }

  // All that an operation named so needs exists, though operations before it may still run, and it
  // may not be enqueued yet. If it `stalls` this rank, the rank waits from now on.
  void Ready(uint64_t name, bool stalls);
  // This rank has done what it could beside an operation that overlaps, if one runs or is to begin.
  void Stalls();
  // The step has failed: what was ready may never begin.
  void Forget();

  // By the thread that runs the operation, in this order. Nothing here allocates memory.
  struct Beginning {
    int peer = -1;
    uint64_t bytes = 0;
    int64_t enqueued = 0;
    bool stalls = true;  // whether this rank can do nothing before it ends
  };
  void Begin(const Fingerprint& fingerprint, const Beginning& beginning);
  void Chose(uint8_t algorithm);
  // Another rank has joined the operation; the first call counts. `waited`: whether this one has
  // waited for that; the clock is read only then.
  void Arrived(int rank, bool waited);
  void BetweenHosts(bool begins);
  void Coded(int64_t duration);
  // Args: bytes: as for the beginning, where they were not known by then.
  void End(bool failed, uint64_t bytes = 0);

  // The records, oldest first, and for each of them when each host's first rank was noticed: in
  // microseconds after the beginning, -1 where none was. From any thread.
  struct Log {
    std::vector<Record> records;
    std::vector<std::vector<int64_t>> arrivals;
  };
  // Args: how many records at most, and the earliest end of one; those that run are there always.
  Log Read(size_t most = kRecords, int64_t since = 0);

 private:
  struct ReadyMark {
    uint64_t name = 0;
    int64_t at = 0;
  };
  static constexpr size_t kMarks = 64;

  // What changes in the current record until its end: written without the mutex, by the thread that
  // runs the operation.
  struct Changing {
    std::atomic<uint8_t> algorithm{0};
    std::atomic<int32_t> last{-1};
    std::atomic<int64_t> last_arrived{0};
    std::atomic<int64_t> between_begun{0};
    std::atomic<int64_t> between_ended{0};
    std::atomic<int64_t> coding{0};

    void Clear();
    void CopyTo(Record* record) const;
  };

  void ForgetLocked();

  inline static std::atomic<bool> recording_{true};

  Record& current() { return records_[written_ % kRecords]; }
  std::atomic<uint32_t>* arrivals() { return &arrivals_[written_ % kRecords * hosts_]; }

  const std::vector<int> host_of_;
  size_t participants_ = host_of_.size();
  const size_t hosts_;
  std::mutex mutex_;
  std::vector<Record> records_;
  // hosts_ of them for each record: 1 + microseconds, 0 for none; written as what is in `Changing`.
  std::vector<std::atomic<uint32_t>> arrivals_;
  Changing changing_;
  uint64_t written_ = 0;  // records before the current one
  bool open_ = false;
  std::vector<uint64_t> seen_;  // for each rank the last record that it has arrived in
  int64_t looked_ = 0;          // when the clock was read last
  std::array<ReadyMark, kMarks> marks_;
  size_t marked_ = 0;
  int64_t stalled_since_ = 0;  // 0 while this rank goes on beside its operations
  bool stalls_ = false;        // whether the current operation does not let it
  uint64_t overlapping_ = 0;   // ready, not begun
  bool next_stalls_ = false;   // the first of them, by now
};

// What `Ready` knows an operation by.
uint64_t HashOf(const Fingerprint& fingerprint);

// Writes what the recorders of this process hold to a file, when something has gone wrong.
//
// One file per process. It is written at once by a thread of its own, which needs nothing of
// Python, and again when Python has given the stacks of its threads. Every writing is atomic.
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
  // The same as `Ask` on this signal from now on, after which a handler that was there before runs
  // as well.
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
  int process_ = 0;         // a forked child has no thread
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
  uint64_t requests_ = 0;      // so far
  uint64_t written_ = 0;       // of them
  uint64_t stacks_given_ = 0;  // for them
  int last_error_ = 0;         // that has been warned of
};

}  // namespace tfdist
