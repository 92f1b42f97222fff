// The recorder of a communicator's last operations, and the flight log: a file with the records of
// all recorders of this process, for analysis after a crash.
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

// The record of one collective or message. Times are nanoseconds of the steady clock. If an event
// has not happened, its time is 0.
struct Record {
  Fingerprint fingerprint;
  uint64_t number = 0;    // number of the operation in its communicator, from 1
  uint64_t bytes = 0;     // size of this rank's input or output, whichever is larger
  int32_t peer = -1;      // the other rank of a message
  int32_t last = -1;      // the last rank for which this rank waited; -1 if it did not wait
  uint8_t algorithm = 0;  // the algorithm of an all-reduce
  bool failed = false;
  int64_t enqueued = 0;
  int64_t begun = 0;
  int64_t last_arrived = 0;
  int64_t ended = 0;
  // When the part of a hierarchical all-reduce between the hosts began and ended.
  int64_t between_begun = 0;
  int64_t between_ended = 0;
  int64_t coding = 0;  // time spent on encoding, decoding and summing
};

// A flight recorder: records the last collectives and messages of a communicator, as this rank sees
// them.
class Recorder {
 public:
  static constexpr size_t kRecords = 1024;

  // Args: host_of: for each rank, the index of its host.
  explicit Recorder(const std::vector<int>& host_of);

  // Sets the number of participants in a collective. By default, it is the number of ranks.
  void SetParticipants(size_t participants) { participants_ = participants; }

  // Selects whether all recorders of this process record later operations. Recording is on by
  // default. Turn it off only to measure its cost.
  static void SetRecording(bool on) { recording_.store(on, std::memory_order_relaxed); }

  // Records that the inputs of an operation are ready. The operation may be enqueued later.
  // Args: name: the `HashOf` of the operation's fingerprint; stalls: whether this rank waits for
  // the operation from now on.
  void Ready(uint64_t name, bool stalls);
  // Records that this rank has finished all work that overlaps with the current operation, or with
  // the next operation if none is running. From now on, the rank waits for that operation.
  void Stalls();
  // Forgets the operations that are ready but have not begun. Called when the step has failed.
  void Forget();

  // The thread that runs an operation calls the following functions in this order. They do not
  // allocate memory.
  struct Beginning {
    int peer = -1;
    uint64_t bytes = 0;
    int64_t enqueued = 0;
    bool stalls = true;  // whether this rank waits until the operation ends
  };
  void Begin(const Fingerprint& fingerprint, const Beginning& beginning);
  void Chose(uint8_t algorithm);
  // Records that another rank has joined the operation. Only the first call for each rank has an
  // effect.
  // Args: waited: whether this rank had to wait for the other rank. If not, the time of the last
  // reading of the clock is used.
  void Arrived(int rank, bool waited);
  void BetweenHosts(bool begins);
  void Coded(int64_t duration);
  // Args: bytes: the size of the operation, if it was unknown at the beginning.
  void End(bool failed, uint64_t bytes = 0);

  // The records, oldest first. For each record, `arrivals` contains one number for each host: the
  // time from the beginning of the operation to the arrival of the first rank of that host, in
  // microseconds. The number is -1 if no rank of the host has arrived.
  struct Log {
    std::vector<Record> records;
    std::vector<std::vector<int64_t>> arrivals;
  };
  // Returns the records. May be called from any thread.
  // Args: most: the maximum number of records; since: omits records that ended before this time.
  // The running operation is not omitted.
  Log Read(size_t most = kRecords, int64_t since = 0);

 private:
  struct ReadyMark {
    uint64_t name = 0;
    int64_t at = 0;
  };
  static constexpr size_t kMarks = 64;

  // The fields of the current record that change before the operation ends. The thread that runs
  // the operation writes them without locking the mutex.
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
  // For each record, one entry for each host: 1 + the number of microseconds, or 0 if no rank of
  // the host has arrived. Written without locking the mutex, like `Changing`.
  std::vector<std::atomic<uint32_t>> arrivals_;
  Changing changing_;
  uint64_t written_ = 0;  // number of records before the current one
  bool open_ = false;
  // For each rank, the number of the last record in which the rank arrived.
  std::vector<uint64_t> seen_;
  int64_t looked_ = 0;  // time of the last reading of the clock
  std::array<ReadyMark, kMarks> marks_;
  size_t marked_ = 0;
  int64_t stalled_since_ = 0;  // 0 if this rank does not wait for an operation
  bool stalls_ = false;        // whether this rank waits for the current operation
  // The number of overlapping operations that are ready but have not begun.
  uint64_t overlapping_ = 0;
  bool next_stalls_ = false;  // whether this rank already waits for the first of them
};

// Returns the identifier of an operation for `Recorder::Ready`.
uint64_t HashOf(const Fingerprint& fingerprint);

// Writes the contents of this process's recorders to a file after an error, a stall or a signal.
//
// Each process has one file. A separate thread, which does not depend on Python, writes the file
// immediately. It writes the file again when Python has supplied the stacks of its threads. Each
// write replaces the file atomically.
class FlightLog {
 public:
  struct Settings {
    std::string path;
    // The members of the file's JSON object that describe this process.
    std::string header;
    // Returns the state of all communicators, as a JSON array.
    std::function<std::string()> communicators;
    std::function<void(const std::string&)> warn;
  };

  // Never destroyed, because other threads may still use it while the process exits.
  static FlightLog& Instance();

  // Starts the log. Call this function once. Throws Error if no descriptor or thread is available.
  void Start(Settings settings);
  // Requests that the log be written. Returns immediately, and has no effect before `Start`.
  // Args: kind: the reason: "error", "stall" (this rank waits), "waited" (other ranks wait for this
  // rank) or "signal"; communicator: the name of the affected communicator, or "" if there is none.
  void Ask(const char* kind, const std::string& communicator, const std::string& message);
  // Reports a collective or message of this rank that has stalled, and requests that the log be
  // written. Other workers, even outside the group, receive the report and write their logs as
  // well.
  void Stalled(const std::string& communicator, const std::string& message);
  // Returns the last report of a stall since the previous call; "" if there is none.
  std::string TakeStalled();
  // From now on, requests that the log be written when this process receives the signal. The
  // earlier handler of the signal still runs afterward.
  void AskOnSignal(int number);

  // Switches to another path and header, and drops the reasons that have been recorded so far.
  void Move(const std::string& path, const std::string& header);
  // Sets the state of the session's exchanges, as a JSON object.
  void SetSession(const std::string& session);
  // Returns a descriptor that becomes readable when the log needs the stacks of Python's threads.
  int stacks_wanted() const { return stacks_wanted_; }
  void GiveStacks(const std::string& stacks);
  // Waits until all requested writes are complete, but at most `seconds` seconds.
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
  // The process in which the thread runs. A forked child does not have the thread.
  int process_ = 0;
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
  uint64_t requests_ = 0;      // number of requests so far
  uint64_t written_ = 0;       // number of requests that have been written
  uint64_t stacks_given_ = 0;  // number of requests for which there are stacks
  int last_error_ = 0;         // the last error that a warning has reported
};

}  // namespace tfdist
