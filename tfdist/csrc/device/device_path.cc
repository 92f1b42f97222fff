#include "device/device_path.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <set>
#include <utility>

#include "collective/collectives.h"
#include "device/awaiting.h"
#include "device/kernel_names.h"
#include "error.h"
#include "reduce/reduce.h"

namespace tfdist {
namespace {

// Up to so many bytes our own kernels come before NCCL: what others have measured between GPUs that
// NVLink connects.
constexpr size_t kMostBeforeNccl = size_t{256} << 10;
constexpr size_t kMostInOneShot = size_t{256} << 10;
constexpr size_t kLeastBuffer = 4096;

// The number of the GPU, once there is a driver.
int NumberOf(const DevicePath::Setup& setup) {
  const std::set<std::string> known{"", "own", "nccl", "host"};
  if (!known.count(setup.transport)) {
    throw Error(Code::kInvalidArgument,
                "TFDIST_DEVICE_ALGORITHM must be own, nccl or host. Received: " + setup.transport +
                    ".");
  }
  if (setup.buffer_bytes < kLeastBuffer || setup.buffer_bytes % device::kVectorBytes != 0) {
    throw Error(Code::kInvalidArgument,
                "TFDIST_DEVICE_BUFFERS must be a multiple of 16, at least 4096. Received: " +
                    std::to_string(setup.buffer_bytes) + ".");
  }
  cuda::Load(setup.cuda);
  return setup.gpu;
}

std::string Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The tensors of an operation, wherever a piece of either side ends.
std::vector<KernelAllReduce::Tensor> Tensors(const Operation& operation) {
  std::vector<KernelAllReduce::Tensor> tensors;
  size_t begin = 0;
  operation.in.ForEach(0, operation.in.bytes(), [&](const char* data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
      const BasicPiece<char> out = operation.out.At(begin);
      const size_t part = std::min(bytes - done, out.bytes);
      tensors.push_back({reinterpret_cast<uintptr_t>(data + done),
                         reinterpret_cast<uintptr_t>(out.data), part});
      done += part;
      begin += part;
    }
  });
  return tensors;
}

}  // namespace

DevicePath::DevicePath(Setup setup, Guard& guard)
    : setup_(std::move(setup)),
      guard_(guard),
      gpu_(std::make_shared<const Gpu>(NumberOf(setup_))),
      stream_(*gpu_),
      done_(*gpu_),
      host_(*gpu_, guard) {
  if (setup_.kernels.empty()) {
    lack_ = "there are no compiled kernels";
    return;
  }
  try {
    const std::string binary = Contents(setup_.kernels);
    AllocateBuffers();
    kernels_.emplace(*gpu_, binary.data(), KernelNames().data(), KernelNames().size());
  } catch (const Error& error) {
    lack_ = error.what();
  }
}

void DevicePath::AllocateBuffers() {
  const size_t bytes = KernelAllReduce::StagingBytes(setup_.buffer_bytes);
  try {
    staging_.emplace(*gpu_, bytes);
    words_.emplace(*gpu_, KernelAllReduce::kWordBytes);
  } catch (const Error& error) {
    throw Error(error.code(), "its buffers of " + std::to_string(bytes) +
                                  " bytes cannot be had on " + gpu_->name() +
                                  "; lower TFDIST_DEVICE_BUFFERS, or set "
                                  "TF_FORCE_GPU_ALLOW_GROWTH=true: " + error.what());
  }
}

void DevicePath::AwaitInput(cuda::Event* ready,
                            const std::function<bool()>& ends) const noexcept {
  try {
    gpu_->Use();
    AwaitPassed([ready] { return HasPassed(ready); }, ends);
  } catch (const Error&) {
  }
}

void DevicePath::Run(Fabric& fabric, Operation& operation, const OnHost& on_host) {
  const Fingerprint& asked = operation.fingerprint;
  if (operation.compression && RunCompressed(fabric.topology, operation, on_host)) return;
  if (asked.kind != Kind::kAllReduce || operation.compression) {
    return host_.Run(operation, on_host);
  }
  CheckReducible(asked.type, asked.op);
  if (operation.in.bytes() != operation.out.bytes()) {
    throw Error(Code::kInvalidArgument,
                "The result of an all-reduce must be as large as its input.");
  }
  if (ranks_.empty()) {
    try {
      Open(fabric, operation);
    } catch (...) {
      ranks_.clear();
      throw;
    }
  }
  const Transport transport = Choose(operation);
  if (transport == Transport::kHost) return host_.Run(operation, on_host);
  const std::vector<KernelAllReduce::Tensor> tensors = Tensors(operation);
  Operation arrival;
  arrival.fingerprint = asked;
  // The ranks must cut their buckets alike: a part of one is reduced with the same of the others.
  for (const KernelAllReduce::Tensor& tensor : tensors) {
    arrival.fingerprint.AddShape({static_cast<int64_t>(tensor.bytes)});
  }
  Barrier(fabric, arrival);
  try {
    if (cuda::Event* const ready = *operation.device) {
      gpu_->Use();
      cuda::Check(cuda::Load().cuStreamWaitEvent(stream_.get(), ready, 0), "cuStreamWaitEvent");
    }
    Launch(tensors, asked, transport);
    done_.Record(stream_.get());
    Await(done_, guard_, [&] {
      if (nccl_) nccl_->Poll();
    });
    if (nccl_) nccl_->Poll();
    if (own_ && own_->outcome() != device::Outcome::kRunning) {
      throw Error(Code::kUnavailable, "A GPU has waited too long for the others' in an all-reduce "
                                      "that all of them had begun.");
    }
  } catch (...) {
    GiveUp();
    throw;
  }
}

// Says once why values are encoded on the host.
void DevicePath::AnnounceNoRoom(const std::string& why) {
  if (setup_.warn && !std::exchange(announced_no_room_, true)) {
    setup_.warn("Compressed gradients go through the host's memory, since " + why);
  }
}

// Whether it has been run on the GPU.
bool DevicePath::RunCompressed(const Topology& topology, Operation& operation,
                               const OnHost& on_host) {
  const bool may = kernels_ && setup_.transport != "host";
  if (!may || !DeviceCoder::Takes(topology, operation)) return false;
  try {
    if (!coder_) coder_ = std::make_unique<DeviceCoder>(*gpu_, *kernels_, guard_);
    coder_->MakeRoom(topology, operation);
  } catch (const Error& error) {
    if (error.code() == Code::kInvalidArgument) throw;
    AnnounceNoRoom(error.what());
    return false;
  }
  coder_->Run(operation, on_host);
  return true;
}

void DevicePath::Leave() {
  if (!own_) return;
  try {
    own_->Leave(stream_.get());
    SettleSoon(stream_, done_);
  } catch (const Error&) {
    // The others' GPUs do not depend on it.
  }
}

// What all ranks find out about each other, so that all choose alike.
void DevicePath::Open(Fabric& fabric, const Operation& operation) {
  Introduction own{};
  own.gpu = gpu_->uuid();
  std::strncpy(own.place, gpu_->place().c_str(), sizeof(own.place) - 1);
  own.process = ThisProcess();
  own.buffer_bytes = setup_.buffer_bytes;
  std::strncpy(own.transport, setup_.transport.c_str(), sizeof(own.transport) - 1);
  if (kernels_) {
    try {
      own.staging = staging_->Share();
      own.words = words_->Share();
      own.staging_address = staging_->address();
      own.words_address = words_->address();
      own.has_kernels = 1;
    } catch (const Error& error) {
      lack_ = error.what();
    }
  }
  std::string no_nccl = "no library is given";
  if (!setup_.nccl.empty()) {
    try {
      own.nccl = nccl::Load(setup_.nccl).version;
    } catch (const Error& error) {
      no_nccl = error.what();
      if (setup_.warn && setup_.transport.empty()) setup_.warn(no_nccl);
    }
  }
  rank_ = fabric.topology.rank;
  ranks_ = Introduce(fabric, operation, own);
  no_nccl_ = WhyNoNccl(fabric);
  CheckTransport(fabric, own.nccl ? "" : no_nccl);
  if (MayUseNccl()) {
    id_ = IdOfRankZero(fabric, operation, rank_ == 0 ? NcclGroup::NewId() : nccl::UniqueId{});
  }
  OpenPeers(fabric, operation);
  AnnounceNoNccl(fabric);
  if (setup_.transport == "own" && !own_) {
    throw Error(Code::kInvalidArgument,
                "TFDIST_DEVICE_ALGORITHM=own needs GPUs that reach each other's memory. They do "
                "not, since " + (lack_.empty() ? "another rank lacks something" : lack_) + ".");
  }
}

void DevicePath::CheckTransport(const Fabric& fabric, const std::string& no_nccl) const {
  for (size_t rank = 1; rank < ranks_.size(); ++rank) {
    if (std::strcmp(ranks_[rank].transport, ranks_[0].transport) != 0) {
      throw Error(Code::kMismatch, "TFDIST_DEVICE_ALGORITHM must be the same on all ranks. "
                                   "Received: '" + std::string(ranks_[0].transport) + "' on " +
                                       fabric.topology.names[0] + ", '" + ranks_[rank].transport +
                                       "' on " + fabric.topology.names[rank] + ".");
    }
  }
  if (setup_.transport == "nccl" && !MayUseNccl()) {
    throw Error(Code::kInvalidArgument,
                "TFDIST_DEVICE_ALGORITHM=nccl needs one version of NCCL on all ranks, each of which "
                "has a GPU of its own, but " + no_nccl_ + "." +
                    (no_nccl.empty() ? "" : " Here: " + no_nccl));
  }
}

// Where ranks share a GPU, a kernel may be queued behind another one that waits for it.
bool DevicePath::HaveOwnGpus() const {
  std::set<std::string> gpus;
  for (const Introduction& rank : ranks_) {
    gpus.insert(std::string(rank.gpu.bytes, sizeof(rank.gpu.bytes)));
  }
  return setup_.may_share_gpu || gpus.size() == ranks_.size();
}

// Why no rank can reach another one's memory, for a reason that all of them know; else "".
std::string DevicePath::CommonLack(const Fabric& fabric) const {
  if (fabric.topology.hosts.size() > 1) return "there are several hosts";
  if (ranks_.size() > device::kMostRanks) return "there are more than 16 ranks";
  if (!HaveOwnGpus()) return "two ranks have the same GPU";
  for (const Introduction& rank : ranks_) {
    if (!rank.has_kernels) return lack_.empty() ? "a rank lacks compiled kernels" : lack_;
    if (rank.buffer_bytes != setup_.buffer_bytes) return "TFDIST_DEVICE_BUFFERS differs";
    for (const Introduction& other : ranks_) {
      if (AreSame(rank.process, other.process) && !AreSame(rank.gpu, other.gpu)) {
        return "a process has several GPUs";
      }
    }
  }
  return "";
}

void DevicePath::OpenPeers(Fabric& fabric, const Operation& operation) {
  if (!setup_.transport.empty() && setup_.transport != "own") return;
  if (const std::string why = CommonLack(fabric); !why.empty()) {
    lack_ = why;
    if (rank_ == 0 && fabric.topology.hosts.size() == 1) Announce();
    return;
  }
  const auto try_to = [&](const std::function<void()>& body) {
    try {
      body();
    } catch (const Error& error) {
      lack_ = error.what();
    }
    return AllAgree(fabric, operation, lack_.empty());
  };
  bool good = try_to([&] { peers_ = std::make_unique<Peers>(*gpu_, ranks_, rank_); });
  if (good) {
    if (!peers_->Probe(fabric, operation, *gpu_)) {
      lack_ = "what a GPU has written is not what another one reads";
    }
    good = try_to([&] {
      own_ = std::make_unique<KernelAllReduce>(KernelAllReduce::Setup{
          gpu_.get(), &*kernels_, static_cast<uint32_t>(rank_), peers_->shared(), setup_.buffer_bytes,
          kMostInOneShot, setup_.timeout_seconds});
    });
  }
  if (good) return;
  own_ = nullptr;
  peers_ = nullptr;
  Announce();
}

// Says once why all-reduces go another way than they could.
void DevicePath::Announce() const {
  if (!setup_.warn || !setup_.transport.empty() || lack_.empty()) return;
  setup_.warn("No GPU reads another one's memory, since " + lack_ + ". All-reduces go through " +
              (MayUseNccl() ? "NCCL." : "the host's memory."));
}

std::string DevicePath::WhyNoNccl(const Fabric& fabric) const {
  if (!HaveOwnGpus()) return "two ranks have the same GPU";
  // Which NCCL refuses.
  std::set<std::pair<int, std::string>> places;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!places.emplace(fabric.topology.host_of[rank], ranks_[rank].place).second &&
        !setup_.may_share_gpu) {
      return "two ranks have parts of the same GPU";
    }
  }
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_[rank].nccl == 0) return fabric.topology.names[rank] + " uses none";
  }
  for (size_t rank = 1; rank < ranks_.size(); ++rank) {
    if (ranks_[rank].nccl != ranks_[0].nccl) {
      return fabric.topology.names[0] + " has " + nccl::VersionOf(ranks_[0].nccl) + ", and " +
             fabric.topology.names[rank] + " has " + nccl::VersionOf(ranks_[rank].nccl);
    }
  }
  return "";
}

// Between hosts there is nothing as fast.
void DevicePath::AnnounceNoNccl(const Fabric& fabric) const {
  const bool wanted = fabric.topology.hosts.size() > 1 && setup_.transport.empty();
  if (!wanted || rank_ != 0 || !setup_.warn) return;
  if (!no_nccl_.empty()) {
    setup_.warn("NCCL is not used, since " + no_nccl_ +
                ". All-reduces of what is on GPUs go through the host's memory.");
  }
}

DevicePath::Transport DevicePath::Choose(const Operation& operation) const {
  const Fingerprint& asked = operation.fingerprint;
  if (setup_.transport == "host" || operation.in.bytes() == 0) return Transport::kHost;
  const bool nccl = setup_.transport != "own" && MayUseNccl() && NcclSupports(asked.type, asked.op);
  if (own_ && (!nccl || operation.in.bytes() <= kMostBeforeNccl)) return Transport::kOwn;
  return nccl ? Transport::kNccl : Transport::kHost;
}

void DevicePath::Launch(const std::vector<KernelAllReduce::Tensor>& tensors,
                        const Fingerprint& asked, Transport transport) {
  if (transport == Transport::kOwn) {
    return own_->Launch(tensors, asked.type, asked.op, stream_.get());
  }
  if (!nccl_) {
    const auto size = static_cast<int>(ranks_.size());
    NcclGroup::Setup setup{gpu_.get(), id_, rank_, size, setup_.timeout_seconds};
    setup.guard = &guard_;
    nccl_ = std::make_unique<NcclGroup>(setup);
  }
  nccl_->Grouped([&] {
    for (const KernelAllReduce::Tensor& tensor : tensors) {
      nccl_->AllReduce(tensor.in, tensor.out, tensor.bytes / SizeOf(asked.type), asked.type,
                       asked.op, stream_.get());
    }
  });
}

// Ends what has been launched, here and on the other ranks, whose memory it may use.
void DevicePath::GiveUp() noexcept {
  if (own_) own_->Abort();
  if (nccl_) nccl_->Abort();
  SettleSoon(stream_, done_);
}

}  // namespace tfdist
