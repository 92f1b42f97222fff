// The recorder of a communicator's last operations, and the flight log: a file of all recorders
// that a reader can open after a crash.
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

// One collective or message. Times are nanoseconds of the steady clock; 0 for events that have not
// happened.
struct Record {
  Fingerprint fingerprint;
  uint64_t number = 0;    // counted over the communicator, from 1
  uint64_t bytes = 0;     // the larger of this rank's input and output
  int32_t peer = -1;      // of a message
  int32_t last = -1;      // the rank that arrived last in a wait; -1 for none
  uint8_t algorithm = 0;  // of an all-reduce
  bool failed = false;
  int64_t enqueued = 0;
  int64_t begun = 0;
  int64_t last_arrived = 0;
  int64_t ended = 0;
  int64_t between_begun = 0;  // start of a hierarchical all-reduce's part between hosts
  int64_t between_ended = 0;
  int64_t coding = 0;  // time spent on compression
};

// A flight recorder: this rank's view of the last collectives and messages of a communicator.
class Recorder {
 public:
  static constexpr size_t kRecords = 1024;

  // Args: for each rank, the index of its host.
  explicit Recorder(const std::vector<int>& host_of);

  // Sets the number of participants in a collective, if it differs from the number of ranks.
  void SetParticipants(size_t participants) { participants_ = participants; }

  // Selects whether all recorders of this process record later operations. Recording is on by
  // default; turn it off only to measure its cost.
  static void SetRecording(bool on) { recording_.store(on, std::memory_order_relaxed); }

  // Records that the inputs of an operation are ready; the operation may not be enqueued yet. Args:
  // name: its `HashOf`; stalls: whether this rank waits for the operation from now on.
  void Ready(uint64_t name, bool stalls);
  // Records that this rank has finished the work that overlaps the current operation, or the next
  // one, and now waits for that operation.
  void Stalls();
  // Forgets operations that are ready and have not begun; called if the step has failed.
  void Forget();

  // The following functions are called in this order by the thread that runs the operation. They
  // allocate no memory.
  struct Beginning {
    int peer = -1;
    uint64_t bytes = 0;
    int64_t enqueued = 0;
    bool stalls = true;  // whether this rank is blocked until the operation ends
  };
  void Begin(const Fingerprint& fingerprint, const Beginning& beginning);
  void Chose(uint8_t algorithm);
  // Records that another rank has joined the operation; only the first call counts. Args: waited:
  // whether this rank waited for the other one. If not, the clock is not read.
  void Arrived(int rank, bool waited);
  void BetweenHosts(bool begins);
  void Coded(int64_t duration);
  // Args: bytes: as in `Beginning`, if not known at the beginning.
  void End(bool failed, uint64_t bytes = 0);

  // The records, oldest first. Also, for each record and each host, the arrival of the host's first
  // rank in microseconds after the beginning; -1 for none.
  struct Log {
    std::vector<Record> records;
    std::vector<std::vector<int64_t>> arrivals;
  };
  // Returns the records; may be called from any thread. Args: the maximum number of records, and
  // the earliest end of a record. The running operation is always included.
  Log Read(size_t most = kRecords, int64_t since = 0);

 private:
  struct ReadyMark {
    uint64_t name = 0;
    int64_t at = 0;
  };
  static constexpr size_t kMarks = 64;

  // The fields of the current record that change until its end; written without the mutex by the
  // thread that runs the operation.
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
  // Per record an entry for each host: 1 + microseconds, 0 for none. Written like `Changing`.
  std::vector<std::atomic<uint32_t>> arrivals_;
  Changing changing_;
  uint64_t written_ = 0;  // records before the current one
  bool open_ = false;
  std::vector<uint64_t> seen_;  // per rank: the number of the last record in which it arrived
  int64_t looked_ = 0;          // time of the last clock reading
  std::array<ReadyMark, kMarks> marks_;
  size_t marked_ = 0;
  int64_t stalled_since_ = 0;  // 0 while this rank waits for no operation
  bool stalls_ = false;        // whether the current operation blocks this rank
  uint64_t overlapping_ = 0;   // overlapping operations that are ready and have not begun
  bool next_stalls_ = false;   // whether this rank already waits for the first of them
};

// The identifier of an operation for `Ready`.
uint64_t HashOf(const Fingerprint& fingerprint);

// Writes the contents of this process's recorders to a file after an error, a stall or a signal.
//
// Each process has one file. A separate thread, independent of Python, writes it at once, and again
// when Python has supplied the stacks of its threads. Each write is atomic.
class FlightLog {
 public:
  struct Settings {
    std::string path;
    std::string header;  // members of the file's object that describe this process, as JSON
    std::function<std::string()> communicators;  // an array, as JSON
    std::function<void(const std::string&)> warn;
  };

  // Never destroyed: other threads may use it while the process exits.
  static FlightLog& Instance();

  // Starts the log; call it once. Throws Error if no descriptor or thread is available.
  void Start(Settings settings);
  // Requests a write because of "error", "stall" (this rank waits), "waited" (other ranks wait for
  // this one) or "signal". communicator: "" for none. Returns at once; has no effect before
  // `Start`.
  void Ask(const char* kind, const std::string& communicator, const std::string& message);
  // Reports a stalled collective or message of this rank. Other workers, even outside the group,
  // receive the report and write their logs as well.
  void Stalled(const std::string& communicator, const std::string& message);
  // Returns the stalls reported since the last call; "" for none.
  std::string TakeStalled();
  // Calls `Ask` on this signal from now on. An earlier handler still runs afterward.
  void AskOnSignal(int number);

  // Switches to another path and header, and drops the reasons so far.
  void Move(const std::string& path, const std::string& header);
  // Sets the state of the session's exchanges, as JSON.
  void SetSession(const std::string& session);
  // A descriptor that becomes readable when stacks are needed.
  int stacks_wanted() const { return stacks_wanted_; }
  void GiveStacks(const std::string& stacks);
  // Waits until all requested writes are complete, at most `seconds`.
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
  int process_ = 0;         // the process that has the thread; forked children do not
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
  uint64_t written_ = 0;       // requests already written
  uint64_t stacks_given_ = 0;  // requests that have stacks
  int last_error_ = 0;         // last error reported in a warning
};

}  // namespace tfdist
