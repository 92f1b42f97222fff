// A rank's view of its group: runs collectives in order and fails them when necessary.
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
    std::vector<std::string> names;    // each rank's name in messages
    std::vector<int> hosts;            // per rank: a number unique to its host
    std::vector<int> control;          // per rank: a connected stream socket; -1 for this one
    std::vector<int> data;             // per rank on another host: a stream socket; else -1
    TlsFiles tls;                      // for the sockets; empty for none
    std::unique_ptr<Segment> segment;  // null for a single rank on its host
    double silence_warning_seconds = 5;
    double silence_timeout_seconds = 60;
    double start_seconds = 300;
    double stall_seconds = 30;
    double timeout_seconds = 600;
    double patience_seconds = 1;  // without progress, until a canceled operation fails
    std::string algorithm;
    // For device memory; `timeout_seconds` and `warn` are taken from this setup.
    std::optional<DevicePath::Setup> device;
    // A stream socket that gets a byte when the communicator is aborted; duplicated. Zero or
    // negative for none.
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
  // The GPUs of its device operations; empty for none.
  const std::vector<std::shared_ptr<const Gpu>>& gpus() const { return gpus_; }
  // The kernels of `DevicePath`.
  const KernelModule* kernels() const { return kernels_.get(); }
  // The number of participants in a collective: all processes, or all their GPUs.
  int participants() const { return size() * std::max(1, static_cast<int>(gpus_.size())); }

  // Runs a collective after all earlier ones, in this thread if none are pending. Throws Error.
  void Run(Operation operation) { queue_.Run(std::move(operation)); }
  // Runs a collective in the communicator's own thread. `done` may destroy the buffers of
  // `operation`.
  void Enqueue(Operation operation, Done done) {
    queue_.Enqueue(std::move(operation), std::move(done));
  }
  // Enqueues one GPU's part of an operation of all GPUs of this process. Every GPU must enqueue the
  // same operations in the same order.
  void EnqueuePart(size_t gpu, Operation part, Done done);

  // Fails all pending and later operations on every rank. Only the first cause counts.
  void Abort(const Error& cause) { GiveUp(cause, true); }
  // Reports that this rank's step failed, and why. A rank that waits for this rank fails with the
  // cause. So does a rank that joins a later operation, since it counts fewer failed steps.
  void StepFailed(const Error& cause);
  // Throws Error after an abort. May be called from any thread.
  void CheckAborted();
  // Returns why all ranks have been aborted; none if they have not been aborted, or if the cause is
  // still unknown. May be called from any thread.
  std::optional<AbortState> Aborted();
  // Waits for pending operations, sends farewells, and frees everything but the object itself.
  // Other threads may be in any other call during this one.
  void Close();

  Statistics statistics();
  // TCP statistics per rank; all zero for ranks of this host.
  std::vector<TcpStatistics> links();
  Recorder& recorder() { return recorder_; }
  // Args: the maximum number of records and the earliest end of a record, as for the recorder.
  CommunicatorState State(size_t records, int64_t since);

 private:
  // Guards waits for this process's GPUs. Such a wait needs no other rank's program and shows no
  // progress, so only an abort of the group ends it early, not a cancellation.
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
  std::vector<std::shared_ptr<const Gpu>> gpus_;  // of `device_`, which is destroyed first
  std::shared_ptr<const KernelModule> kernels_;   // the same
  std::unique_ptr<Assemblies> assemblies_;        // set if there are several GPUs
  const double timeout_seconds_;
  const Cancellation::Seconds patience_;

  OperationQueue queue_;
  const Cancellation* cancellation_ = nullptr;  // of the running operation; used by its thread
  std::optional<uint64_t> launched_bytes_;      // of the last operation, if it was only launched

  std::mutex doing_mutex_;
  Doing doing_;
  uint8_t failures_ = 0;                 // steps of this rank that have failed
  std::array<Fingerprint, 16> joined_;   // of the last collectives, at their number modulo 16
  std::vector<uint64_t> messages_to_;    // sent to each rank so far
  std::vector<uint64_t> messages_from_;  // received from each rank so far

  std::mutex abort_mutex_;  // also guards the fabric's destruction
  std::atomic<bool> aborted_{false};
  // Whether, and until when, the abort is withheld from other ranks because its cause may soon be
  // known.
  std::atomic<bool> held_back_{false};
  Clock::time_point due_;
  Error cause_{Code::kUnavailable, ""};  // of the abort
  int64_t aborted_at_ = 0;
  std::optional<AbortState::Detected> detected_;  // of the last operation that failed
  int news_ = -1;
  Statistics final_;  // set when the fabric is destroyed
  std::atomic<uint64_t> collectives_{0}, device_bytes_{0};
};

}  // namespace tfdist
