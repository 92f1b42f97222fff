// A group of ranks as one of them sees it: runs collectives in order, and fails them when it must.
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
    std::vector<std::string> names;    // what messages call each rank
    std::vector<int> hosts;            // for each rank a number that its host alone has
    std::vector<int> control;          // for each rank a connected stream socket; -1 for this one
    std::vector<int> data;             // for each rank of another host a stream socket; else -1
    TlsFiles tls;                      // for the sockets; empty for none
    std::unique_ptr<Segment> segment;  // none for a rank alone on its host
    double silence_warning_seconds = 5;
    double silence_timeout_seconds = 60;
    double start_seconds = 300;
    double stall_seconds = 30;
    double timeout_seconds = 600;
    double patience_seconds = 1;  // without progress, for an operation that is canceled
    std::string algorithm;
    std::optional<DevicePath::Setup>
        device;  // for what is on a GPU; its times and `warn` are these
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
  // Those of its operations in GPUs' memory; empty if it has none.
  const std::vector<std::shared_ptr<const Gpu>>& gpus() const { return gpus_; }
  // Those of `DevicePath`.
  const KernelModule* kernels() const { return kernels_.get(); }
  // How many ranks reduce, gather and so on: all processes, or all their GPUs.
  int participants() const { return size() * std::max(1, static_cast<int>(gpus_.size())); }

  // Runs a collective, after those before it; in this thread if there are none. Throws Error.
  void Run(Operation operation) { queue_.Run(std::move(operation)); }
  // The same in the communicator's own thread; `done` may destroy what `operation` points to.
  void Enqueue(Operation operation, Done done) {
    queue_.Enqueue(std::move(operation), std::move(done));
  }
  // The same with what one of the GPUs brings to an operation of all of this process. Each comes to
  // the same operations in the same order.
  void EnqueuePart(size_t gpu, Operation part, Done done);

  // Fails what is pending, and all that follows, on every rank; the first message stays.
  void Abort(Code code, const std::string& message);
  // Says that this rank's step has failed, and why. Whoever waits for this rank fails with the
  // message, or, where both go on, finds out that the other's step has not failed.
  void StepFailed(const std::string& message);
  // Throws Error once operations fail; from any thread.
  void CheckAborted();
  // Waits for what is pending, says farewell, and frees everything but the object itself. Other
  // threads may be in any call meanwhile.
  void Close();

  Statistics statistics();
  // Of the link to each rank; all zero for those of this host.
  std::vector<TcpStatistics> links();
  Recorder& recorder() { return recorder_; }
  // Args: how many records at most, and the earliest end of one, as for the recorder.
  CommunicatorState State(size_t records, int64_t since);

 private:
  // For waits for this process's GPUs. Those come to their end without another rank's program, and
  // show no progress meanwhile, so that only the group's end ends them.
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
  std::string Cause(const Error& error);
  void GiveUp(Code code, const std::string& message, bool spread);
  void GiveUpHere();
  void SpreadWhatIsDue();
  std::string StepEnded() const;
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
  std::vector<std::shared_ptr<const Gpu>> gpus_;  // the path's
  std::shared_ptr<const KernelModule> kernels_;   // the same
  std::unique_ptr<Assemblies> assemblies_;        // where there are several
  const double timeout_seconds_;
  const Cancellation::Seconds patience_;

  OperationQueue queue_;
  const Cancellation* cancellation_ = nullptr;  // of what runs, for the thread that runs it
  std::optional<uint64_t> launched_bytes_;      // of the last operation, if it was only launched

  std::mutex doing_mutex_;
  Doing doing_;
  uint8_t failures_ = 0;                 // steps of this rank that have failed
  std::array<Fingerprint, 16> joined_;   // the last collectives, by number
  std::vector<uint64_t> messages_to_;    // sent to each rank so far
  std::vector<uint64_t> messages_from_;  // received from each rank so far

  std::mutex abort_mutex_;  // also of the fabric's end
  std::atomic<bool> aborted_{false};
  // Whether the others do not know yet, since somebody may be about to say why; and until when.
  std::atomic<bool> held_back_{false};
  Clock::time_point due_;
  Code abort_code_ = Code::kUnavailable;
  std::string abort_message_;
  Statistics final_;  // once the fabric is gone
  std::atomic<uint64_t> collectives_{0}, device_bytes_{0};
};

}  // namespace tfdist
