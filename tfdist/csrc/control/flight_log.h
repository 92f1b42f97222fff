// The flight recorder and the flight log. The flight recorder records the last operations of a
// communicator. The flight log is a file with the records of all communicators of this process, for
// analysis after a crash.
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

// The record of one collective or message. All times are in nanoseconds of the steady clock. If an
// event has not happened, its time is 0.
struct Record {
  Fingerprint fingerprint;
  uint64_t number = 0;  // number of the operation in its communicator, beginning at 1
  uint64_t bytes = 0;   // size of this rank's input or output, whichever is larger
  int32_t peer = -1;    // the other rank of a send or receive
  // The last rank for which this rank had to wait, or -1 if it did not have to wait.
  int32_t last = -1;
  uint8_t algorithm = 0;  // the algorithm of an all-reduce
  bool failed = false;
  int64_t enqueued = 0;
  int64_t begun = 0;
  int64_t last_arrived = 0;
  int64_t ended = 0;
  // For a hierarchical all-reduce: when the step between the hosts began and ended.
  int64_t between_begun = 0;
  int64_t between_ended = 0;
  int64_t coding = 0;  // time spent on encoding, decoding and summing
};

// Records the last collectives and messages of a communicator, as this rank sees them.
class Recorder {
 public:
  static constexpr size_t kRecords = 1024;

  // Args: host_of: for each rank, the index of its host.
  explicit Recorder(const std::vector<int>& host_of);

  // Sets the number of participants in a collective, which is needed for the bus bandwidth. By
  // default, it is the number of ranks.
  void SetParticipants(size_t participants) { participants_ = participants; }

  // Turns recording on or off, for all recorders of this process and all operations that begin
  // later. Recording is on by default, and needs to be turned off only to measure its cost.
  static void SetRecording(bool on) { recording_.store(on, std::memory_order_relaxed); }

  // Records that the inputs of an operation are available. The step may enqueue the operation
  // later.
  // Args:
  //   name: the result of `HashOf` for the operation's fingerprint.
  //   stalls: whether this rank has nothing to compute until the operation ends.
  void Ready(uint64_t name, bool stalls);
  // Records that this rank has finished the work that overlaps with the current operation, or with
  // the next operation if none is running. From now on, the rank waits for that operation to end.
  void Stalls();
  // Forgets the operations that are ready but have not begun. This must be called when the step has
  // failed, because these operations may never begin.
  void Forget();

  // For each operation, the thread that runs the operation calls the following functions in this
  // order. These functions do not allocate memory.
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
  // Args: waited: whether this rank had to wait for the other rank. If false, the recorder does not
  // read the clock, and uses the time of its last reading as the time of the arrival.
  void Arrived(int rank, bool waited);
  void BetweenHosts(bool begins);
  void Coded(int64_t duration);
  // Args: bytes: the size of the operation, which may have been unknown when `Begin` was called.
  void End(bool failed, uint64_t bytes = 0);

  // The records, in the order of the operations. For each record, `arrivals` contains one number
  // for each host: the time from the beginning of the operation until the first rank of the host
  // joined, in microseconds. The number is -1 if no rank of the host has joined.
  struct Log {
    std::vector<Record> records;
    std::vector<std::vector<int64_t>> arrivals;
  };
  // Returns the last records. May be called from any thread.
  // Args:
  //   most: the maximum number of records.
  //   since: a time. Operations that ended before this time are omitted. The running operation is
  //     never omitted.
  Log Read(size_t most = kRecords, int64_t since = 0);

 private:
  struct ReadyMark {
    uint64_t name = 0;
    int64_t at = 0;
  };
  static constexpr size_t kMarks = 64;

  // The fields of the current record that change while the operation runs. They are atomic, because
  // the thread that runs the operation writes them without locking the mutex.
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
  // One element for each record and each host: 1 + the number of microseconds until the first rank
  // of the host joined, or 0 if no rank of the host has joined. Like the fields of `Changing`, the
  // elements are written without locking the mutex.
  std::vector<std::atomic<uint32_t>> arrivals_;
  Changing changing_;
  uint64_t written_ = 0;  // the number of records before the current one
  bool open_ = false;
  // For each rank, the number of the last record that contains an arrival of this rank.
  std::vector<uint64_t> seen_;
  int64_t looked_ = 0;  // the result of the last reading of the clock
  std::array<ReadyMark, kMarks> marks_;
  size_t marked_ = 0;
  // The time when this rank began to wait for an operation, or 0 if it does not wait.
  int64_t stalled_since_ = 0;
  bool stalls_ = false;  // whether this rank waits for the current operation
  // The number of operations that overlap with computation, are ready, and have not begun.
  uint64_t overlapping_ = 0;
  // Whether this rank already waits for the first of these operations.
  bool next_stalls_ = false;
};

// Returns a hash of the operation's name, which identifies the operation in `Recorder::Ready`.
uint64_t HashOf(const Fingerprint& fingerprint);

// Writes the flight log: a file with the records of all recorders of this process. The log is
// written after an error, a stall or a signal.
//
// Each process has one file, which is replaced atomically by each write. A separate thread writes
// the file immediately. This thread does not depend on Python, because Python may hang. When Python
// has supplied the stacks of its threads, the thread writes the file once more.
class FlightLog {
 public:
  struct Settings {
    std::string path;
    // JSON text with the members of the file's JSON object that describe this process.
    std::string header;
    // A function that returns the state of all communicators, as a JSON array.
    std::function<std::string()> communicators;
    std::function<void(const std::string&)> warn;
  };

  // Returns the only object of this class. The object is never destroyed, because other threads may
  // still use it while the process exits.
  static FlightLog& Instance();

  // Starts the thread that writes the log. Must be called only once. Throws Error if no file
  // descriptor is available, and std::system_error if no thread is available.
  void Start(Settings settings);
  // Requests that the log be written, and returns immediately. Has no effect before `Start`.
  // Args:
  //   kind: the kind of the reason: "error", "stall" (this rank waits), "waited" (other ranks wait
  //     for this rank) or "signal".
  //   communicator: the name of the affected communicator, or "" if there is none.
  //   message: a text that explains the reason.
  void Ask(const char* kind, const std::string& communicator, const std::string& message);
  // Reports that a collective or message of this rank has stalled, and requests that the log be
  // written. Python gets the report from `TakeStalled`, and forwards it to the other workers, even
  // outside the group. They then write their logs as well.
  void Stalled(const std::string& communicator, const std::string& message);
  // Returns the last message passed to `Stalled` since the previous call of this function, or "" if
  // there is none.
  std::string TakeStalled();
  // Installs a signal handler that requests that the log be written. After that, the signal's
  // earlier handler still runs.
  void AskOnSignal(int number);

  // Switches to another path and header. Drops the reasons, the state of the session and the stacks
  // that have been recorded so far.
  void Move(const std::string& path, const std::string& header);
  // Sets the state of the session's exchanges, in which the workers compare their programs and
  // batches over the control connections. The state is a JSON object.
  void SetSession(const std::string& session);
  // Returns a descriptor that becomes readable when the log needs the stacks of Python's threads.
  int stacks_wanted() const { return stacks_wanted_; }
  void GiveStacks(const std::string& stacks);
  // Waits until all requested writes are complete, or until `seconds` seconds have passed.
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
  // The process in which the thread runs. Requests in a forked child are ignored, because the child
  // does not have the thread.
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
  uint64_t requests_ = 0;  // the number of requests so far
  uint64_t written_ = 0;   // the number of these requests that have been written
  // The number of requests at the time when Python last supplied stacks.
  uint64_t stacks_given_ = 0;
  // The errno of the last write, or 0 if it succeeded. A warning is printed only if a write fails
  // with another error than the previous write.
  int last_error_ = 0;
};

}  // namespace tfdist
