#include "device/message_copies.h"

#include <algorithm>

#include "collective/collectives.h"
#include "device/awaiting.h"
#include "device/kernel_all_reduce.h"

namespace tfdist {
namespace {

// Chunks on each side: one is copied while the host waits for the other one and meets the other rank.
constexpr size_t kInTransit = 2;
// Of both staging buffers together, which chunks take in turn.
constexpr size_t kSlots = 2 * kInTransit;

bool Sends(const Operation& operation) { return operation.fingerprint.kind == Kind::kSend; }

size_t BytesOf(const Operation& operation) {
  return Sends(operation) ? operation.in.bytes() : operation.out.bytes();
}

}  // namespace

MessageCopies::MessageCopies(DeviceRank& rank, size_t buffer_bytes, Guard& guard)
    : rank_(rank), slot_bytes_(KernelAllReduce::StagingBytes(buffer_bytes) / kSlots), guard_(guard) {
  for (size_t slot = 0; slot < kSlots; ++slot) copied_.emplace_back(*rank.gpu);
}

// The ranks meet once for each chunk c: the sender comes when it has written c, the receiver when it has
// read c - 2. So after that meeting the slot of c + 2, which held c - 2, is free. The first two chunks are
// written before any meeting: the receiver has read all of the message before, since it arrived for this
// one.
void MessageCopies::Run(Fabric& fabric, const Operation& operation, cuda::Address staging) {
  const size_t count = (BytesOf(operation) + slot_bytes_ - 1) / slot_bytes_;
  const auto meet = [&] {
    Operation arrival;
    arrival.fingerprint = operation.fingerprint;
    Barrier(fabric, arrival);
  };
  if (Sends(operation)) {
    size_t launched = 0;
    for (size_t chunk = 0; chunk < count; ++chunk) {
      while (launched < std::min(chunk + kInTransit, count)) Launch(operation, launched++, staging);
      AwaitChunk(chunk);
      meet();
    }
  } else {
    for (size_t chunk = 0; chunk < count; ++chunk) {
      if (chunk >= kInTransit) AwaitChunk(chunk - kInTransit);
      meet();
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

}  // namespace tfdist
