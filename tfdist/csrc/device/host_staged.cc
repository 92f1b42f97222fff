#include "device/host_staged.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <string>
#include <utility>

#include "collective/collectives.h"
#include "collective/transfer.h"
#include "device/gpu.h"
#include "device/kernel_launch.h"
#include "device/kernels/staging.h"
#include "device/stream_waits.h"
#include "error.h"
#include "reduce/reduce.h"

namespace tfdist {
namespace {

// The number of chunks that are copied at the same time. Two are enough: while the GPU copies one
// chunk, the host waits until the other chunk has been copied, and synchronizes with the other
// rank.
constexpr size_t kInTransit = 2;
// The number of slots into which the two staging buffers are divided. Chunk c uses slot c % kSlots.
constexpr size_t kSlots = 2 * kInTransit;

bool Sends(const Operation& operation) { return operation.fingerprint.kind == Kind::kSend; }

size_t BytesOf(const Operation& operation) {
  return Sends(operation) ? operation.in.bytes() : operation.out.bytes();
}

}  // namespace

MessageCopies::MessageCopies(DeviceRank& rank, size_t buffer_bytes, Guard& guard)
    : rank_(rank),
      slot_bytes_(KernelAllReduce::StagingBytes(buffer_bytes) / kSlots),
      guard_(guard) {
  for (size_t slot = 0; slot < kSlots; ++slot) copied_.emplace_back(*rank.gpu);
}

// The ranks synchronize once for each chunk c. The sender does this when it has written chunk c,
// and the receiver does this when it has read chunk c - 2. Afterwards, the slot of chunk c - 2 is
// free, and the sender may write chunk c + 2 to the same slot.
//
// At the beginning, all slots are free: the receiver has joined this message, so it has finished
// reading the previous message.
void MessageCopies::Run(Fabric& fabric, const Operation& operation, cuda::Address staging) {
  const size_t count = (BytesOf(operation) + slot_bytes_ - 1) / slot_bytes_;
  const auto synchronize = [&] {
    Operation arrival;
    arrival.fingerprint = operation.fingerprint;
    Barrier(fabric, arrival);
  };
  if (Sends(operation)) {
    size_t launched = 0;
    for (size_t chunk = 0; chunk < count; ++chunk) {
      while (launched < std::min(chunk + kInTransit, count)) Launch(operation, launched++, staging);
      AwaitChunk(chunk);
      synchronize();
    }
  } else {
    for (size_t chunk = 0; chunk < count; ++chunk) {
      if (chunk >= kInTransit) AwaitChunk(chunk - kInTransit);
      synchronize();
      Launch(operation, chunk, staging);
    }
    if (count > 0) AwaitChunk(count - 1);
  }
}

void MessageCopies::Launch(const Operation& operation, size_t chunk, cuda::Address staging) {
  const size_t slot = chunk % kSlots;
  const size_t begin = chunk * slot_bytes_;
  const size_t bytes = std::min(slot_bytes_, BytesOf(operation) - begin);
  cuda::Address at = staging + slot * slot_bytes_;
  if (Sends(operation)) {
    operation.in.ForEach(begin, bytes, [&](const char* data, size_t part) {
      rank_.stream.Copy(at, cuda::AddressOf(data), part);
      at += part;
    });
  } else {
    operation.out.ForEach(begin, bytes, [&](char* data, size_t part) {
      rank_.stream.Copy(cuda::AddressOf(data), at, part);
      at += part;
    });
  }
  copied_[slot].Record(rank_.stream.get());
}

void MessageCopies::AwaitChunk(size_t chunk) { Await(copied_[chunk % kSlots], guard_); }

namespace {

using Tensor = KernelAllReduce::Tensor;

constexpr size_t kFloat = sizeof(float);

}  // namespace

ExactShares::ExactShares(const Topology& groups, const Operation& part)
    : tensors_(TensorsOf(part)),
      ranks_(groups.my_host()),
      me_(static_cast<size_t>(groups.my_place())) {
  size_t owners = ranks_.size();
  for (const auto& group : groups.hosts) {
    owners = std::min(owners, group.size());
    slots_ = std::max(slots_, group.size());
  }
  sizes_ =
      CutEvenly(part.in.bytes(), kFloat, static_cast<int>(owners), static_cast<int>(ranks_.size()));
  largest_ = *std::max_element(sizes_.begin(), sizes_.end());
  slot_ = Aligned(largest_);
}

size_t ExactShares::Begins(size_t place) const {
  size_t begin = 0;
  for (size_t before = 0; before < place; ++before) begin += Size(before);
  return begin;
}

void ExactShares::Begin(const DeviceRank& rank, cuda::Address memory) {
  rank_ = &rank;
  memory_ = memory;
}

// Calls `use(tensor)` for each contiguous piece of the share of the rank at `place`. Each piece is
// sent as a separate message, so that the pieces need not be packed.
template <typename Use>
void ExactShares::ForTensors(size_t place, Use use) const {
  const size_t first = Begins(place), behind = first + Size(place);
  size_t begin = 0;
  for (const KernelAllReduce::Tensor& tensor : tensors_) {
    const size_t from = std::max(begin, first), to = std::min(begin + tensor.bytes, behind);
    if (from < to) use({tensor.in + (from - begin), tensor.out + (from - begin), to - from});
    begin += tensor.bytes;
  }
}

void ExactShares::ExchangeValues() const {
  for (size_t place = 0; place < ranks_.size(); ++place) {
    if (place != me_) {
      ForTensors(place, [&](const Tensor& tensor) { Send(tensor.in, tensor.bytes, place); });
    }
    cuda::Address to = Slot(place);
    ForTensors(me_, [&](const Tensor& tensor) {
      if (place == me_) {
        rank_->stream.Copy(to, tensor.in, tensor.bytes);
      } else {
        Receive(to, tensor.bytes, place);
      }
      to += tensor.bytes;
    });
  }
}

// Sums the received values into slot 0. The kernel is the same as in an all-reduce, where it
// reduces the staging buffers of the ranks. Here, it reduces the slots.
void ExactShares::AddUp(cuda::Address ended) const {
  if (ranks_.size() == 1 || !HasShare()) return;
  device::Staging staging{};
  for (size_t place = 0; place < ranks_.size(); ++place) {
    staging.of[place] = cuda::PointerTo<char>(Slot(place));
  }
  staging.ranks = static_cast<uint32_t>(ranks_.size());
  staging.part = slot_ / device::kVectorBytes;
  device::Waiting waiting{};
  waiting.ended = cuda::PointerTo<uint64_t>(ended);
  rank_->kernels->Launch("tfdist_reduce_float32_sum", BlocksFor(staging.part, kMaxBlocksAlone),
                         kKernelThreads, rank_->stream.get(), staging.part, staging, waiting, 1.0);
}

void ExactShares::ExchangeSums() const {
  for (size_t place = 0; place < ranks_.size(); ++place) {
    cuda::Address from = Slot(0);
    ForTensors(me_, [&](const Tensor& tensor) {
      if (place == me_) {
        rank_->stream.Copy(tensor.out, from, tensor.bytes);
      } else {
        Send(from, tensor.bytes, place);
      }
      from += tensor.bytes;
    });
    if (place != me_) {
      ForTensors(place, [&](const Tensor& tensor) { Receive(tensor.out, tensor.bytes, place); });
    }
  }
}

void ExactShares::Send(cuda::Address from, size_t bytes, size_t place) const {
  rank_->nccl->Send(from, bytes, DType::kUint8, ranks_[place], rank_->stream.get());
}

void ExactShares::Receive(cuda::Address to, size_t bytes, size_t place) const {
  rank_->nccl->Recv(to, bytes, DType::kUint8, ranks_[place], rank_->stream.get());
}

namespace {

constexpr size_t kChunkBytes = size_t{4} << 20;

// Reduces the inputs of this process's GPUs, and writes the result over the first input. For a
// mean, divides the result by the number of GPUs. Later, the collective on the host divides its
// result by the number of processes.
void ReduceInto(char* first, const std::vector<const void*>& all, size_t bytes,
                const Fingerprint& asked) {
  if (all.size() == 1) return;
  const double divisor = asked.op == ReduceOp::kMean ? static_cast<double>(all.size()) : 1.0;
  Reduce({asked.type, asked.op, divisor, all.data(), static_cast<int>(all.size()),
          bytes / SizeOf(asked.type), first});
}

// Returns the number of rows of each process: the sum of the rows of the process's GPUs.
// Args: rows: the number of rows of each GPU; gpus: the number of GPUs of each process.
std::vector<size_t> OfProcesses(const std::vector<size_t>& rows, size_t gpus) {
  std::vector<size_t> sums(rows.size() / gpus);
  for (size_t rank = 0; rank < rows.size(); ++rank) sums[rank / gpus] += rows[rank];
  return sums;
}

}  // namespace

HostStaged::Lane::Chunk::Chunk(const Gpu& gpu)
    : memory(gpu, kChunkBytes), fetched(gpu), returned(gpu) {}

HostStaged::Lane::Lane(const Gpu& given)
    : gpu(given), down(gpu), up(gpu), fetched(gpu), returned(gpu) {}

void HostStaged::Lane::MakeChunks() {
  if (chunks[0]) return;
  std::unique_ptr<Chunk> made[kChunks];
  for (auto& chunk : made) chunk = std::make_unique<Chunk>(gpu);
  std::move(std::begin(made), std::end(made), std::begin(chunks));
}

void HostStaged::Lane::HoldBack(const Operation& part) const {
  cuda::Event* const ready = *part.device;
  if (!ready) return;
  gpu.Use();
  for (const DeviceStream* stream : {&down, &up}) {
    cuda::Check(cuda::Load().cuStreamWaitEvent(stream->get(), ready, 0), "cuStreamWaitEvent");
  }
}

void HostStaged::Lane::Fetch(const ConstBufferList& from, size_t begin, size_t bytes,
                             char* to) const {
  from.ForEach(begin, bytes, [&](const char* data, size_t part) {
    down.Copy(cuda::AddressOf(to), cuda::AddressOf(data), part);
    to += part;
  });
}

void HostStaged::Lane::Return(const char* from, const BufferList& to, size_t begin,
                              size_t bytes) const {
  to.ForEach(begin, bytes, [&](char* data, size_t part) {
    up.Copy(cuda::AddressOf(data), cuda::AddressOf(from), part);
    from += part;
  });
}

HostStaged::HostStaged(const std::vector<std::shared_ptr<const Gpu>>& gpus, Guard& guard)
    : guard_(guard) {
  for (const auto& gpu : gpus) lanes_.push_back(std::make_unique<Lane>(*gpu));
}

void HostStaged::Run(const Operation& operation, const Parts& parts, const OnHost& on_host) {
  const Kind kind = operation.fingerprint.kind;
  if (lanes_.size() > 1 && (IsMessage(kind) || kind == Kind::kAllToAll)) {
    throw Error(Code::kInvalidArgument, Describe(operation.fingerprint) +
                                            " is for processes with one GPU each. Start one "
                                            "process per GPU.");
  }
  for (size_t i = 0; i < lanes_.size(); ++i) lanes_[i]->HoldBack(*parts[i]);
  try {
    if (kind == Kind::kAllReduce && !operation.compression) {
      InChunks(operation, parts, on_host);
    } else {
      Whole(operation, parts, on_host);
    }
  } catch (...) {
    // After an error, copies from and to the GPUs may be pending. They use the memory of the
    // operation, so wait until they have ended.
    for (const auto& lane : lanes_) {
      SettleSoon(lane->down.get(), lane->fetched);
      SettleSoon(lane->up.get(), lane->returned);
    }
    throw;
  }
}

void HostStaged::InChunks(const Operation& operation, const Parts& parts, const OnHost& on_host) {
  const size_t bytes = parts[0]->in.bytes();
  const size_t count = (bytes + kChunkBytes - 1) / kChunkBytes;
  const auto size = [&](size_t k) { return std::min(kChunkBytes, bytes - k * kChunkBytes); };
  const auto fetch = [&](size_t k) {
    // Each GPU copies the result from the first GPU's chunk. This chunk may be overwritten only
    // after all GPUs have copied the result, so wait for all of them.
    for (const auto& lane : lanes_) Await(lane->chunks[k % kChunks]->returned, guard_);
    for (size_t i = 0; i < lanes_.size(); ++i) {
      Lane::Chunk& chunk = *lanes_[i]->chunks[k % kChunks];
      lanes_[i]->Fetch(parts[i]->in, k * kChunkBytes, size(k),
                       static_cast<char*>(chunk.memory.data()));
      chunk.fetched.Record(lanes_[i]->down.get());
    }
  };
  if (count == 0) {
    // This rank has no data, but the other ranks may have data. This rank joins the collective
    // nevertheless, so that the ranks detect the mismatch.
    Operation nothing;
    nothing.fingerprint = operation.fingerprint;
    return on_host(nothing);
  }
  for (const auto& lane : lanes_) lane->MakeChunks();
  fetch(0);
  for (size_t k = 0; k < count; ++k) {
    if (k + 1 < count) fetch(k + 1);
    std::vector<const void*> all;
    for (const auto& lane : lanes_) {
      Await(lane->chunks[k % kChunks]->fetched, guard_);
      all.push_back(lane->chunks[k % kChunks]->memory.data());
    }
    char* const data = static_cast<char*>(lanes_[0]->chunks[k % kChunks]->memory.data());
    ReduceInto(data, all, size(k), operation.fingerprint);
    Operation part;
    part.fingerprint = operation.fingerprint;
    part.in = ConstBufferList(data, size(k));
    part.out = BufferList(data, size(k));
    on_host(part);
    for (size_t i = 0; i < lanes_.size(); ++i) {
      lanes_[i]->Return(data, parts[i]->out, k * kChunkBytes, size(k));
      lanes_[i]->chunks[k % kChunks]->returned.Record(lanes_[i]->up.get());
    }
  }
  for (const auto& lane : lanes_) {
    for (const auto& chunk : lane->chunks) Await(chunk->returned, guard_);
  }
}

void HostStaged::Whole(const Operation& operation, const Parts& parts, const OnHost& on_host) {
  const Operation& first = *parts[0];
  const Kind kind = operation.fingerprint.kind;
  Operation staged;
  staged.fingerprint = operation.fingerprint;
  staged.peer = operation.peer;
  staged.row_bytes = first.row_bytes;
  staged.sent_rows = first.sent_rows;
  size_t bytes = 0;
  char* const in = FetchAll(operation, parts, &bytes);
  BufferList left;  // the residual of error feedback
  char* error = nullptr;
  if (operation.compression) {
    // The inputs of this process's GPUs are combined before they are encoded. Therefore only one
    // residual is needed, and the residual of the first GPU is used.
    left = first.compression->error;
    error = Take(error_, left.bytes());
    lanes_[0]->Fetch(left.Const(), 0, left.bytes(), error);
    staged.compression = first.compression;
    staged.compression->error = BufferList(error, left.bytes());
  }
  for (const auto& lane : lanes_) {
    lane->fetched.Record(lane->down.get());
    Await(lane->fetched, guard_);
  }
  if (lanes_.size() > 1) Join(parts, in, &bytes, &staged);
  staged.in = ConstBufferList(in, bytes);
  const auto room_for = [&](size_t result) { return BufferList(Take(out_, result), result); };
  if (first.allocate) {
    staged.allocate = [&](const std::vector<size_t>& rows) {
      for (size_t i = 0; i < parts.size(); ++i) {
        parts[i]->out = parts[i]->allocate(rows);
        lanes_[i]->HoldBack(*parts[i]);
      }
      return room_for(first.out.bytes());
    };
  } else {
    staged.received_rows = OfProcesses(first.received_rows, lanes_.size());
    staged.out = room_for(first.out.bytes() * (kind == Kind::kReduceScatter ? lanes_.size() : 1));
  }
  on_host(staged);
  const char* from = staged.out.bytes() ? staged.out.At(0).data : nullptr;
  for (size_t i = 0; i < lanes_.size(); ++i) {
    lanes_[i]->Return(from, parts[i]->out, 0, parts[i]->out.bytes());
    if (kind == Kind::kReduceScatter) from += parts[i]->out.bytes();
  }
  lanes_[0]->Return(error, left, 0, left.bytes());
  for (const auto& lane : lanes_) {
    lane->returned.Record(lane->up.get());
    Await(lane->returned, guard_);
  }
}

char* HostStaged::Take(Growing<MappedMemory>& memory, size_t bytes) const {
  return static_cast<char*>(memory.Take(lanes_[0]->gpu, bytes).data());
}

// Copies the inputs of all GPUs of this process to host memory, one after another. For a broadcast,
// copies only the input of the GPU that has the same index in its process as the root.
char* HostStaged::FetchAll(const Operation& operation, const Parts& parts, size_t* bytes) {
  std::vector<size_t> which(parts.size());
  std::iota(which.begin(), which.end(), size_t{0});
  if (operation.fingerprint.kind == Kind::kBroadcast) {
    which = {static_cast<size_t>(operation.fingerprint.root) % parts.size()};
  }
  for (const size_t i : which) *bytes += parts[i]->in.bytes();
  char* const in = Take(in_, *bytes);
  char* next = in;
  for (const size_t i : which) {
    lanes_[i]->Fetch(parts[i]->in, 0, parts[i]->in.bytes(), next);
    next += parts[i]->in.bytes();
  }
  return in;
}

// Combines the parts of this process's GPUs into one operation, `*staged`. `in` contains their
// inputs.
void HostStaged::Join(const Parts& parts, char* in, size_t* bytes, Operation* staged) const {
  Fingerprint& asked = staged->fingerprint;
  switch (asked.kind) {
    case Kind::kBroadcast:
      asked.root /= static_cast<int32_t>(parts.size());
      break;
    case Kind::kAllGather:
      for (size_t i = 1; i < parts.size(); ++i) staged->sent_rows[0] += parts[i]->sent_rows[0];
      break;
    case Kind::kAllReduce:
    case Kind::kReduceScatter: {
      *bytes /= parts.size();
      std::vector<const void*> all;
      for (size_t i = 0; i < parts.size(); ++i) all.push_back(in + i * *bytes);
      ReduceInto(in, all, *bytes, asked);
      break;
    }
    default:
      break;
  }
}

}  // namespace tfdist
