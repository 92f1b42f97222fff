#include "device/host_staged.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <string>
#include <utility>

#include "device/awaiting.h"
#include "error.h"
#include "reduce/reduce.h"

namespace tfdist {
namespace {

constexpr size_t kChunkBytes = size_t{4} << 20;

// Reduces what this process's GPUs have brought, into the first; the rest of a mean is the host's.
void ReduceInto(char* first, const std::vector<const void*>& all, size_t bytes,
                const Fingerprint& asked) {
  if (all.size() == 1) return;
  const double divisor = asked.op == ReduceOp::kMean ? static_cast<double>(all.size()) : 1.0;
  Reduce({asked.type, asked.op, divisor, all.data(), static_cast<int>(all.size()),
          bytes / SizeOf(asked.type), first});
}

// For each process the rows of all of its GPUs.
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

void HostStaged::Lane::Fetch(const ConstPieces& from, size_t begin, size_t bytes, char* to) const {
  from.ForEach(begin, bytes, [&](const char* data, size_t part) {
    down.Copy(cuda::AddressOf(to), cuda::AddressOf(data), part);
    to += part;
  });
}

void HostStaged::Lane::Return(const char* from, const Pieces& to, size_t begin,
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
    // What has been reduced goes up at once: its memory is the operation's until it has.
    for (const auto& lane : lanes_) {
      SettleSoon(lane->down.get(), lane->fetched);
      SettleSoon(lane->up.get(), lane->returned);
    }
    throw;
  }
}

void HostStaged::InChunks(const Operation& operation, const Parts& parts,
                          const OnHost& on_host) {
  const size_t bytes = parts[0]->in.bytes();
  const size_t count = (bytes + kChunkBytes - 1) / kChunkBytes;
  const auto size = [&](size_t k) { return std::min(kChunkBytes, bytes - k * kChunkBytes); };
  const auto fetch = [&](size_t k) {
    // All of them have the first one's result.
    for (const auto& lane : lanes_) Await(lane->chunks[k % kChunks]->returned, guard_);
    for (size_t i = 0; i < lanes_.size(); ++i) {
      Lane::Chunk& chunk = *lanes_[i]->chunks[k % kChunks];
      lanes_[i]->Fetch(parts[i]->in, k * kChunkBytes, size(k),
                       static_cast<char*>(chunk.memory.data()));
      chunk.fetched.Record(lanes_[i]->down.get());
    }
  };
  if (count == 0) {
    // The others may bring more, and hear of it so.
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
    part.in = ConstPieces(data, size(k));
    part.out = Pieces(data, size(k));
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

void HostStaged::Whole(const Operation& operation, const Parts& parts,
                       const OnHost& on_host) {
  const Operation& first = *parts[0];
  const Kind kind = operation.fingerprint.kind;
  Operation staged;
  staged.fingerprint = operation.fingerprint;
  staged.peer = operation.peer;
  staged.row_bytes = first.row_bytes;
  staged.sent_rows = first.sent_rows;
  size_t bytes = 0;
  char* const in = FetchAll(operation, parts, &bytes);
  Pieces left;  // by compression
  char* error = nullptr;
  if (operation.compression) {
    // Several GPUs have that of the first.
    left = first.compression->error;
    error = Take(error_, left.bytes());
    lanes_[0]->Fetch(left.Const(), 0, left.bytes(), error);
    staged.compression = first.compression;
    staged.compression->error = Pieces(error, left.bytes());
  }
  for (const auto& lane : lanes_) {
    lane->fetched.Record(lane->down.get());
    Await(lane->fetched, guard_);
  }
  if (lanes_.size() > 1) Join(parts, in, &bytes, &staged);
  staged.in = ConstPieces(in, bytes);
  const auto room_for = [&](size_t result) { return Pieces(Take(out_, result), result); };
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

// What the GPUs bring, one behind the other; of a broadcast that of one.
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

// Makes one process's operation of what several GPUs have brought.
void HostStaged::Join(const Parts& parts, char* in, size_t* bytes, Operation* staged) const {
  Fingerprint& asked = staged->fingerprint;
  switch (asked.kind) {
    case Kind::kBroadcast: asked.root /= static_cast<int32_t>(parts.size()); break;
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
    default: break;
  }
}

}  // namespace tfdist
