// One rank's end of a communicator. It runs the operations of this rank in order. If the group is
// aborted, all operations fail.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "collective/collectives.h"
#include "control/communicator_state.h"
#include "control/flight_log.h"
#include "control/watch.h"
#include "device/device_path.h"
#include "device/launch_order.h"
#include "error.h"
#include "operation_queue.h"
#include "tls/tls_stream.h"
#include "transport/fabric.h"
#include "transport/socket.h"

namespace tfdist {

class Communicator : private Guard {
 public:
  struct Setup {
    std::string name;
    int rank = 0;
    std::vector<std::string> names;  // for each rank, its name in error messages
    std::vector<int> hosts;          // for each rank, a number that identifies its host
    std::vector<int> control;        // for each rank, a connected stream socket; -1 for this rank
    // For each rank on another host, a connected stream socket; -1 for the ranks of this host.
    std::vector<int> data;
    // The TLS settings. If they are empty, the sockets are not encrypted.
    TlsFiles tls;
    // The shared memory of this host, or null if no other rank is on this host.
    std::unique_ptr<Segment> segment;
    double silence_warning_seconds = 5;
    double silence_timeout_seconds = 60;
    double start_seconds = 300;
    double stall_seconds = 30;
    double timeout_seconds = 600;
    // A canceled operation fails if the group makes no progress for this time.
    double patience_seconds = 1;
    std::string algorithm;
    // The GPUs and their settings, if the communicator also runs operations on device memory. The
    // values of `timeout_seconds` and `warn` in `device` are ignored; the values in this struct are
    // used instead.
    std::optional<DevicePath::Setup> device;
    // A stream socket to which the communicator sends a byte when the group is aborted, so that the
    // reader of the socket wakes up. The communicator duplicates the descriptor and does not close
    // the original. Zero or a negative number means that there is no socket.
    int news = -1;
    std::function<void(const std::string&)> warn;
  };
  struct Statistics {
    uint64_t collectives = 0;
    uint64_t shared_bytes = 0;
    uint64_t sent_bytes = 0;
    uint64_t received_bytes = 0;
    uint64_t device_bytes = 0;
  };
  using Done = OperationQueue::Done;

  explicit Communicator(Setup setup);
  ~Communicator() override;

  const std::string& name() const { return name_; }
  int rank() const { return fabric_.topology.rank; }
  int size() const { return fabric_.topology.size; }
  // Returns the GPUs on which this communicator runs operations. The list is empty if there are
  // none.
  const std::vector<std::shared_ptr<const Gpu>>& gpus() const { return gpus_; }
  // Returns the result of `DevicePath::kernels`, or null if the communicator has no GPUs.
  const KernelModule* kernels() const { return kernels_.get(); }
  // Returns the number of participants in a collective. It is the number of GPUs of all processes,
  // or the number of processes if they have no GPUs.
  int participants() const { return size() * std::max(1, static_cast<int>(gpus_.size())); }

  // Runs a collective after all earlier ones, and returns when it has ended. If no other operation
  // is pending, the calling thread runs it; otherwise, the communicator's own thread does. Throws
  // Error if the collective fails.
  void Run(Operation operation) { queue_.Run(std::move(operation)); }
  // Queues a collective for the communicator's own thread, and returns immediately. `done` is
  // called when the collective has ended. From then on, the buffers of `operation` are no longer
  // used, so `done` may destroy them.
  void Enqueue(Operation operation, Done done) {
    queue_.Enqueue(std::move(operation), std::move(done));
  }
  // Queues one GPU's part of an operation. The operation runs when all GPUs of this process have
  // queued their parts. All GPUs must queue the same operations in the same order.
  void EnqueuePart(size_t gpu, Operation part, Done done);

  // Aborts the group: all pending and later operations fail on every rank. If the group has already
  // been aborted, the first cause is kept.
  void Abort(const Error& cause) { GiveUp(cause, true); }
  // Reports to the other ranks that this rank's step has failed, and why. A rank that waits for
  // this rank fails with `cause`. A rank that joins an operation later also fails, because its own
  // count of failed steps is lower than this rank's count.
  void StepFailed(const Error& cause);
  // Throws the cause if the communicator has been aborted. May be called from any thread.
  void CheckAborted();
  // Returns why the communicator has been aborted. Returns nullopt if it has not been aborted, or
  // if the cause is still unknown. May be called from any thread.
  std::optional<AbortState> Aborted();
  // Waits for pending operations, sends farewells to the other ranks, and frees all resources of
  // the communicator. Other threads may call the communicator's other functions at the same time.
  void Close();

  Statistics statistics();
  // For each rank, returns the TCP statistics of the connection to it. All statistics are zero for
  // the ranks of this host.
  std::vector<TcpStatistics> links();
  Recorder& recorder() { return recorder_; }
  // Returns a snapshot of the state of this communicator.
  // Args:
  //   records: the maximum number of records.
  //   since: a time. Operations that ended before this time are omitted.
  CommunicatorState State(size_t records, int64_t since);

 private:
  // The guard for waits for this process's own GPUs. A canceled operation usually fails after some
  // time without progress, but a GPU that works reports no progress. The wait also does not depend
  // on the programs of other ranks. A cancellation therefore does not end the wait early; only an
  // abort of the group does.
  class GpuGuard : public Guard {
   public:
    explicit GpuGuard(Communicator& communicator) : communicator_(communicator) {}
    void Check() override { communicator_.CheckGroup(); }

   private:
    Communicator& communicator_;
  };

  void Check() override;
  void NoteProgress() override { progress_.Note(); }
  void CheckGroup();
  bool IsOverdue();
  Error AsError(const std::exception& error) const;
  void Execute(Operation& operation);
  void AwaitInput(Operation& operation);
  bool Dispatch(Operation& operation);
  void RunOnHost(Operation& operation);
  void AwaitLaunched();
  void CloseRecord();
  void AwaitFarewells();
  void Begin(Operation& operation);
  void End(const Operation& operation, bool failed, bool launched = false);
  [[noreturn]] void Fail(const Operation& operation, const Error& error);
  Error Cause(const Error& error);
  void GiveUp(const Error& cause, bool spread);
  void GiveUpHere();
  void SpreadWhatIsDue();
  Error StepEnded(Code code = Code::kUnavailable) const;
  bool HasLeft(const std::string& worker);
  Doing CurrentlyDoing();
  void CheckPeer(int peer) const;
  uint64_t& Messages(Kind kind, int peer);
  bool HasHandled(int peer, const Fingerprint& message);
  bool Joined(uint64_t sequence, Fingerprint* joined);
  Statistics Count() const;

  const std::string name_;
  const Algorithm algorithm_;
  Recorder recorder_;
  Fabric fabric_;
  ProgressClock progress_;
  std::unique_ptr<Watch> watch_;
  GpuGuard gpu_guard_{*this};
  std::unique_ptr<DevicePath> device_;
  // The GPUs of `device_`. This list still exists after `Close` has destroyed `device_`.
  std::vector<std::shared_ptr<const Gpu>> gpus_;
  // The kernels of `device_`, which also still exist after `Close`.
  std::shared_ptr<const KernelModule> kernels_;
  std::unique_ptr<Assemblies> assemblies_;  // null unless this process has several GPUs
  const double timeout_seconds_;
  const Cancellation::Seconds patience_;

  OperationQueue queue_;
  // The cancellation of the running operation, or null. Only the thread that runs the operation
  // uses it.
  const Cancellation* cancellation_ = nullptr;
  // The size of the last operation, if this operation has only been launched and its record is
  // still open.
  std::optional<uint64_t> launched_bytes_;

  std::mutex doing_mutex_;
  Doing doing_;
  uint8_t failures_ = 0;  // the number of this rank's failed steps
  // The fingerprints of the last 16 collectives. The index of a fingerprint is its sequence number
  // modulo 16.
  std::array<Fingerprint, 16> joined_;
  std::vector<uint64_t> messages_to_;    // the number of messages sent to each rank
  std::vector<uint64_t> messages_from_;  // the number of messages received from each rank

  std::mutex abort_mutex_;  // guards the following members and the destruction of `fabric_`
  std::atomic<bool> aborted_{false};
  // Whether this rank has given up its step, but has not yet told the other ranks. This rank waits
  // until the time `due_`, because the program may report the cause by then. If the program does
  // not, the other ranks are told without the cause.
  std::atomic<bool> held_back_{false};
  Clock::time_point due_;
  Error cause_{Code::kUnavailable, ""};  // the cause of the abort
  int64_t aborted_at_ = 0;
  std::optional<AbortState::Detected> detected_;  // the last operation of this rank that failed
  int news_ = -1;
  Statistics final_;  // the statistics at the time when `fabric_` was destroyed
  std::atomic<uint64_t> collectives_{0}, device_bytes_{0};
};

}  // namespace tfdist
