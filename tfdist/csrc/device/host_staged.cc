#include "device/host_staged.h"

#include <algorithm>

#include "device/awaiting.h"

namespace tfdist {
namespace {

constexpr size_t kChunkBytes = size_t{4} << 20;

cuda::Address AddressOf(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }

}  // namespace

HostStaged::Chunk::Chunk(const Gpu& gpu)
    : memory(gpu, kChunkBytes), fetched(gpu), returned(gpu) {}

HostStaged::HostStaged(const Gpu& gpu, Guard& guard)
    : gpu_(gpu), guard_(guard), down_(gpu), up_(gpu), fetched_(gpu), returned_(gpu) {
  for (auto& chunk : chunks_) chunk = std::make_unique<Chunk>(gpu);
}

void HostStaged::Run(Operation& operation, const OnHost& on_host) {
  if (cuda::Event* const ready = *operation.device) {
    gpu_.Use();
    cuda::Check(cuda::Load().cuStreamWaitEvent(down_.get(), ready, 0), "cuStreamWaitEvent");
  }
  try {
    if (operation.fingerprint.kind == Kind::kAllReduce && !operation.compression) {
      InChunks(operation, on_host);
    } else {
      Whole(operation, on_host);
    }
  } catch (...) {
    // What has been reduced goes up at once: its memory is the operation's until it has.
    SettleSoon(down_, fetched_);
    SettleSoon(up_, returned_);
    throw;
  }
}

void HostStaged::InChunks(const Operation& operation, const OnHost& on_host) {
  const size_t bytes = operation.in.bytes();
  const size_t count = (bytes + kChunkBytes - 1) / kChunkBytes;
  const auto size = [&](size_t k) { return std::min(kChunkBytes, bytes - k * kChunkBytes); };
  const auto fetch = [&](size_t k) {
    Chunk& chunk = *chunks_[k % kChunks];
    Await(chunk.returned, guard_);
    Fetch(operation.in, k * kChunkBytes, size(k), static_cast<char*>(chunk.memory.data()));
    chunk.fetched.Record(down_.get());
  };
  if (count == 0) {
    // The others may bring more, and hear of it so.
    Operation nothing;
    nothing.fingerprint = operation.fingerprint;
    return on_host(nothing);
  }
  fetch(0);
  for (size_t k = 0; k < count; ++k) {
    if (k + 1 < count) fetch(k + 1);
    Chunk& chunk = *chunks_[k % kChunks];
    char* const data = static_cast<char*>(chunk.memory.data());
    Await(chunk.fetched, guard_);
    Operation part;
    part.fingerprint = operation.fingerprint;
    part.in = ConstPieces(data, size(k));
    part.out = Pieces(data, size(k));
    on_host(part);
    Return(data, operation.out, k * kChunkBytes, size(k));
    chunk.returned.Record(up_.get());
  }
  for (const auto& chunk : chunks_) Await(chunk->returned, guard_);
}

void HostStaged::Whole(Operation& operation, const OnHost& on_host) {
  Operation staged;
  staged.fingerprint = operation.fingerprint;
  staged.peer = operation.peer;
  staged.row_bytes = operation.row_bytes;
  staged.sent_rows = operation.sent_rows;
  staged.received_rows = operation.received_rows;
  char* const in = Take(in_, operation.in.bytes());
  Fetch(operation.in, 0, operation.in.bytes(), in);
  staged.in = ConstPieces(in, operation.in.bytes());
  const auto room_for = [&](const Pieces& out) {
    return Pieces(Take(out_, out.bytes()), out.bytes());
  };
  if (operation.allocate) {
    staged.allocate = [&](const std::vector<size_t>& rows) {
      operation.out = operation.allocate(rows);
      return room_for(operation.out);
    };
  } else {
    staged.out = room_for(operation.out);
  }
  Pieces left;  // by compression
  char* error = nullptr;
  if (operation.compression) {
    left = operation.compression->error;
    error = Take(error_, left.bytes());
    Fetch(left.Const(), 0, left.bytes(), error);
    staged.compression = operation.compression;
    staged.compression->error = Pieces(error, left.bytes());
  }
  fetched_.Record(down_.get());
  Await(fetched_, guard_);
  on_host(staged);
  Return(staged.out.bytes() ? staged.out.At(0).data : nullptr, operation.out, 0,
         staged.out.bytes());
  Return(error, left, 0, left.bytes());
  returned_.Record(up_.get());
  Await(returned_, guard_);
}

char* HostStaged::Take(Growing<MappedMemory>& memory, size_t bytes) {
  return static_cast<char*>(memory.Take(gpu_, bytes).data());
}

void HostStaged::Fetch(const ConstPieces& from, size_t begin, size_t bytes, char* to) {
  from.ForEach(begin, bytes, [&](const char* data, size_t part) {
    down_.Copy(AddressOf(to), AddressOf(data), part);
    to += part;
  });
}

void HostStaged::Return(const char* from, const Pieces& to, size_t begin, size_t bytes) {
  to.ForEach(begin, bytes, [&](char* data, size_t part) {
    up_.Copy(AddressOf(data), AddressOf(from), part);
    from += part;
  });
}

}  // namespace tfdist
