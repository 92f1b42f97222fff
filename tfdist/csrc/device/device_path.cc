#include "device/device_path.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "collective/collectives.h"
#include "collective/compressed.h"
#include "collective/transfer.h"
#include "control/activity.h"
#include "device/launch_order.h"
#include "device/stream_waits.h"
#include "error.h"
#include "reduce/reduce.h"

namespace tfdist {
namespace {

constexpr int kTrials = 5;
constexpr int kLooksForOnePoll = 20;

std::vector<std::unique_ptr<DeviceRank>> Make(const DeviceSetup& setup) {
  CheckDevice(setup);
  std::vector<std::unique_ptr<DeviceRank>> ranks;
  for (size_t i = 0; i < setup.gpus.size(); ++i) {
    ranks.push_back(std::make_unique<DeviceRank>(setup, i));
  }
  return ranks;
}

std::vector<std::shared_ptr<const Gpu>> GpusOf(
    const std::vector<std::unique_ptr<DeviceRank>>& ranks) {
  std::vector<std::shared_ptr<const Gpu>> gpus;
  for (const auto& rank : ranks) gpus.push_back(rank->gpu);
  return gpus;
}

}  // namespace

DevicePath::DevicePath(Setup setup, Guard& guard)
    : setup_(std::move(setup)),
      guard_(guard),
      ranks_(Make(setup_)),
      gpus_(GpusOf(ranks_)),
      host_(gpus_, guard),
      routes_(setup_, ranks_),
      compressed_(setup_, ranks_, routes_, guard_) {}

void DevicePath::AwaitInput(size_t gpu, const Operation& part,
                            const std::function<bool()>& ends) const noexcept {
  cuda::Event* const ready = part.device ? *part.device : nullptr;
  if (!ready) return;
  try {
    const auto has_passed = [this, gpu, ready] {
      gpus_[gpu]->Use();
      return EventHasPassed(ready);
    };
    AwaitPassed(has_passed, ends);
  } catch (const Error&) {
    // Either the GPU has failed, or `ends` has thrown an error. Ignore the error here, because the
    // next wait will throw the same error.
  }
}

bool DevicePath::Run(Fabric& fabric, Operation& operation, const OnHost& on_host) {
  const Fingerprint& asked = operation.fingerprint;
  Parts parts{&operation};
  if (ranks_.size() > 1) {
    parts.clear();
    for (Operation& part : operation.parts) parts.push_back(&part);
  }
  const Transport transport = Choose(fabric, operation, parts);
  if (transport == Transport::kHost) {
    const bool encoded =
        operation.compression && compressed_.RunOverLinks(fabric.topology, operation, on_host);
    if (!encoded) host_.Run(operation, parts, on_host);
    return false;
  }
  // Operations that were launched earlier may still use the staging buffers through which the
  // message passes.
  if (IsMessage(asked.kind)) AwaitLaunched();
  if (asked.kind == Kind::kAllGather) {
    AllocateGathered(fabric, operation, parts);
  } else {
    Arrive(fabric, operation, parts);
  }
  try {
    if (IsMessage(asked.kind) && transport == Transport::kP2p) {
      HoldBack(parts);
      Copy(fabric, operation);
      return false;
    }
    Launch(fabric, operation, parts);
    if (!operation.launches) {
      AwaitResult();
      return false;
    }
    for (Operation* part : parts) launched_.push_back(std::move(part->kept));
    return true;
  } catch (...) {
    GiveUp();
    throw;
  }
}

// Chooses the transport of an operation. The choice is the same on all ranks.
DevicePath::Transport DevicePath::Choose(Fabric& fabric, Operation& operation, const Parts& parts) {
  const Fingerprint& asked = operation.fingerprint;
  if (operation.compression) {
    for (const Operation* part : parts) CheckCompressible(*part);
    if (IsEncoded(fabric.topology, *operation.compression)) {
      const bool stays =
          compressed_.GoesByNccl(fabric, operation, parts, [this] { AwaitLaunched(); });
      return stays ? Transport::kNccl : Transport::kHost;
    }
    operation.compression.reset();
  }
  if (!MayStay(fabric, operation)) return Transport::kHost;
  if (IsReduction(asked.kind)) CheckReducible(asked.type, asked.op);
  if (asked.kind == Kind::kAllReduce && parts[0]->in.bytes() != parts[0]->out.bytes()) {
    throw Error(Code::kInvalidArgument,
                "The result of an all-reduce must be as large as its input.");
  }
  routes_.Open(fabric, operation);
  if (asked.kind == Kind::kBroadcast) CheckRoot(asked);
  return routes_.Choose(asked, parts);
}

void DevicePath::CheckRoot(const Fingerprint& asked) const {
  const int size = routes_.topology().size;
  if (asked.root >= 0 && asked.root < size) return;
  throw Error(Code::kInvalidArgument, "The root must be one of the group's " +
                                          std::to_string(size) +
                                          ". Received: " + std::to_string(asked.root) + ".");
}

std::shared_ptr<const KernelModule> DevicePath::kernels() const {
  return ranks_.size() == 1 && setup_.transport != "host" ? ranks_[0]->kernels : nullptr;
}

// Returns whether an operation can run without passing through host memory. A message can do this
// only in a group of two ranks. The reason is that the transports for device memory synchronize all
// ranks of the group. In a larger group, only two of the ranks take part in a message.
bool DevicePath::MayStay(const Fabric& fabric, const Operation& operation) const {
  switch (operation.fingerprint.kind) {
    case Kind::kAllReduce:
    case Kind::kReduceScatter:
    case Kind::kAllGather:
    case Kind::kBroadcast:
      return true;
    case Kind::kSend:
    case Kind::kReceive:
      return ranks_.size() == 1 && fabric.topology.size == 2;
    default:
      return false;
  }
}

void DevicePath::Copy(Fabric& fabric, const Operation& operation) {
  DeviceRank& rank = *ranks_[0];
  const bool sends = operation.fingerprint.kind == Kind::kSend;
  const auto receiver = sends ? static_cast<size_t>(operation.peer) : routes_.first();
  if (!copies_) copies_ = std::make_unique<MessageCopies>(rank, setup_.buffer_bytes, guard_);
  copies_->Run(fabric, operation, rank.peers->shared()[receiver].staging);
  Count(operation);
}

void DevicePath::Count(const Operation& part) {
  moved_bytes_ += std::max(part.in.bytes(), part.out.bytes());
}

// Waits until all ranks have joined an operation. For an all-reduce, also checks that all ranks
// divide their data into tensors of the same sizes, because each tensor is reduced with the tensors
// at the same position on the other ranks.
void DevicePath::Arrive(Fabric& fabric, const Operation& operation, const Parts& parts) {
  Operation arrival;
  arrival.fingerprint = operation.fingerprint;
  for (const Operation* part : parts) {
    if (operation.fingerprint.kind != Kind::kAllReduce) break;
    for (const KernelAllReduce::Tensor& tensor : TensorsOf(*part)) {
      arrival.fingerprint.AddShape({static_cast<int64_t>(tensor.bytes)});
    }
  }
  Barrier(fabric, arrival);
}

// Tells the other ranks how many rows this process sends, and allocates memory for the rows of all
// ranks.
void DevicePath::AllocateGathered(Fabric& fabric, const Operation& operation, const Parts& parts) {
  std::vector<size_t> own;
  for (const Operation* part : parts) own.push_back(part->sent_rows[0]);
  const std::vector<size_t> rows = TellAll(fabric, operation, own);
  const auto ends = [this] {
    guard_.Check();
    return false;
  };
  for (size_t gpu = 0; gpu < parts.size(); ++gpu) {
    Operation& part = *parts[gpu];
    part.fingerprint = operation.fingerprint;
    AllocateResult(routes_.topology(), part, rows);
    part.received_rows = rows;
    AwaitInput(gpu, part, ends);
  }
  // Wait until the GPUs of all ranks are ready. Only then may the operation take its place in the
  // launch order, because it blocks all later operations of these GPUs while it holds this place.
  Operation ready;
  ready.fingerprint = operation.fingerprint;
  Barrier(fabric, ready);
}

// Waits until it is this operation's turn in the launch order, on which all ranks agree. The
// earlier operations have then been launched on the GPUs of this process. This wait does not depend
// on the program of another rank, because all ranks have already joined this operation. The wait
// also ensures that two threads never launch on the same GPU concurrently, because NCCL does not
// allow this.
std::deque<LaunchOrder::Turn> DevicePath::AwaitTurn(Fabric& fabric, const Operation& operation) {
  std::deque<LaunchOrder::Turn> turns;
  std::vector<size_t> proposed;
  for (const auto& rank : ranks_) {
    turns.emplace_back(LaunchOrder::Of(rank->number), routes_.name());
    proposed.push_back(turns.back().proposed());
  }
  const std::vector<size_t> all = TellAll(fabric, operation, proposed);
  for (LaunchOrder::Turn& turn : turns) turn.Settle(*std::max_element(all.begin(), all.end()));
  for (LaunchOrder::Turn& turn : turns) turn.Await(guard_, setup_.timeout_seconds);
  return turns;
}

void DevicePath::Launch(Fabric& fabric, const Operation& operation, const Parts& parts) {
  const Fingerprint& asked = operation.fingerprint;
  const auto turns = AwaitTurn(fabric, operation);
  if (asked.kind == Kind::kAllReduce && !operation.compression) Measure(fabric, operation);
  HoldBack(parts);
  if (operation.compression) {
    JoinNccl(fabric, operation);
    compressed_.Launch(parts);
  } else if (routes_.Choose(asked, parts) == Transport::kNccl) {
    JoinNccl(fabric, operation);
    nccl_->Launch(asked, parts);
  } else {
    LaunchKernels(asked, parts);
  }
  for (const auto& rank : ranks_) rank->done.Record(rank->stream.get());
  for (const Operation* part : parts) Count(*part);
}

void DevicePath::HoldBack(const Parts& parts) const {
  for (size_t i = 0; i < parts.size(); ++i) {
    cuda::Event* const ready = parts[i]->device ? *parts[i]->device : nullptr;
    if (!ready) continue;
    gpus_[i]->Use();
    cuda::Check(cuda::Load().cuStreamWaitEvent(ranks_[i]->stream.get(), ready, 0),
                "cuStreamWaitEvent");
  }
}

void DevicePath::AwaitLaunched() {
  if (!HasLaunched()) return;
  try {
    AwaitResult();
  } catch (...) {
    GiveUp();
    throw;
  }
}

bool DevicePath::HasPassed() const {
  for (const auto& rank : ranks_) {
    if (!rank->done.HasPassed()) return false;
  }
  return true;
}

// Throws Error if the collective has failed on one of the GPUs. Otherwise, this rank would continue
// to wait for the other GPUs, which may wait for the failed GPU.
void DevicePath::Poll() const {
  for (const auto& rank : ranks_) {
    if (rank->nccl) rank->nccl->Poll();
    if (rank->own && rank->own->outcome() != device::Outcome::kRunning) {
      throw Error(Code::kUnavailable,
                  "A GPU timed out waiting for the other GPUs in an all-reduce that all of them "
                  "had begun.");
    }
  }
}

// Waits until all launched operations have ended. All work of a rank runs in one stream, so the
// event of the last launch passes only after all earlier launches have ended.
void DevicePath::AwaitResult() {
  const int64_t begin = Nanoseconds();
  int looks = 0;
  AwaitPassed([this] { return HasPassed(); },
              [&] {
                guard_.Check();
                if (++looks % kLooksForOnePoll != 0) return false;
                Poll();
                if (static_cast<double>(Nanoseconds() - begin) < setup_.timeout_seconds * 1e9) {
                  return false;
                }
                throw Error(Code::kUnavailable,
                            "The GPUs did not finish a collective that all of them had begun "
                            "within TFDIST_COLLECTIVE_TIMEOUT.");
              });
  Poll();
  launched_.clear();
}

bool DevicePath::Leave() {
  bool is_read = false, settled = true;
  for (const auto& rank : ranks_) {
    is_read = is_read || rank->own;
    if (!rank->own && !HasLaunched()) continue;
    settled = SettleSoon(rank->stream.get(), rank->done) && settled;
  }
  if (settled) {
    launched_.clear();
  } else {
    // A stream that still waits for another rank may never end this wait by itself, so `GiveUp`
    // ends it.
    GiveUp();
  }
  return is_read;
}

// Aborts pending operations, because they would use memory that this destructor frees.
DevicePath::~DevicePath() {
  if (HasLaunched()) GiveUp();
}

// Launches the kernels of each GPU in a separate thread. A launch blocks while the queue of its GPU
// is full. The kernels in this queue may wait for kernels that have not yet been launched on
// another GPU, so a single thread could block forever.
void DevicePath::LaunchKernels(const Fingerprint& asked, const Parts& parts) {
  Siblings siblings(guard_);
  const auto launch = [&](size_t i) {
    ranks_[i]->own->Launch(TensorsOf(*parts[i]), asked.type, asked.op, ranks_[i]->stream.get(),
                           siblings);
  };
  AtOnce(parts.size(), launch, &siblings);
}

// If both kernels and NCCL are available, measures up to which size an all-reduce between these
// GPUs is faster with kernels. The measurement is done only once for each communicator.
void DevicePath::Measure(Fabric& fabric, const Operation& operation) {
  if (measured_ || !routes_.HaveChoice()) return;
  measured_ = true;
  std::vector<std::unique_ptr<DeviceMemory>> memories;
  const size_t largest = TriedSizes().back();
  try {
    for (const auto& gpu : gpus_) memories.push_back(std::make_unique<DeviceMemory>(*gpu, largest));
  } catch (const Error&) { memories.clear(); }
  if (!AllAgree(fabric, operation, !memories.empty())) return;
  JoinNccl(fabric, operation);
  Fingerprint asked;
  asked.kind = Kind::kAllReduce;
  asked.type = DType::kFloat32;
  const auto seconds = [&](bool kernels, size_t bytes) {
    std::vector<Operation> tried(memories.size());
    Parts parts;
    for (size_t i = 0; i < tried.size(); ++i) {
      char* const data = reinterpret_cast<char*>(memories[i]->address());
      tried[i].in = ConstBufferList(data, bytes);
      tried[i].out = BufferList(data, bytes);
      parts.push_back(&tried[i]);
    }
    const auto launch = [&] {
      if (kernels) {
        LaunchKernels(asked, parts);
      } else {
        nccl_->Launch(asked, parts);
      }
    };
    const auto await = [this] {
      for (const auto& rank : ranks_) rank->done.Record(rank->stream.get());
      AwaitResult();
    };
    launch();  // the first launch takes longer, so it is not measured
    await();
    const int64_t begin = Nanoseconds();
    for (int trial = 0; trial < kTrials; ++trial) launch();
    await();
    return static_cast<double>(Nanoseconds() - begin) / kTrials / 1e9;
  };
  const auto slowest = [&](const std::vector<double>& own) {
    return LargestOfAll(fabric, operation, own);
  };
  routes_.PreferKernelsUpTo(WhereFirstIsFaster(seconds, slowest));
}

void DevicePath::JoinNccl(Fabric& fabric, const Operation& operation) {
  if (nccl_) return;
  const NcclRanks::Setup setup{routes_.id(),
                               routes_.first(),
                               routes_.topology().size,
                               routes_.min_buffer_bytes(),
                               setup_.timeout_seconds,
                               !IsMessage(operation.fingerprint.kind),
                               setup_.warn};
  nccl_ = std::make_unique<NcclRanks>(fabric, operation, ranks_, setup, guard_);
}

void DevicePath::GiveUp() noexcept {
  for (const auto& rank : ranks_) {
    if (rank->own) rank->own->Abort();
    if (rank->nccl) rank->nccl->Abort();
  }
  for (const auto& rank : ranks_) SettleSoon(rank->stream.get(), rank->done);
  launched_.clear();
}

}  // namespace tfdist
