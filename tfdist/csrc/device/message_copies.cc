#include "device/message_copies.h"

#include <algorithm>
#include <utility>

#include "collective/collectives.h"
#include "device/awaiting.h"

namespace tfdist {

// The buffers take turns. Before each meeting the sender has written to one, and the receiver has read
// what it was told of at the meeting before: so the other one is free.
void CopyMessage(Fabric& fabric, const Operation& operation, DeviceRank& rank,
                 cuda::Address staging, size_t buffer_bytes, Guard& guard) {
  const bool sends = operation.fingerprint.kind == Kind::kSend;
  const size_t bytes = sends ? operation.in.bytes() : operation.out.bytes();
  const auto meet = [&] {
    Operation arrival;
    arrival.fingerprint = operation.fingerprint;
    Barrier(fabric, arrival);
  };
  const auto settle = [&] {
    rank.done.Record(rank.stream.get());
    Await(rank.done, guard);
  };
  cuda::Address buffer = staging, other = staging + buffer_bytes;
  for (size_t begin = 0; begin < bytes; begin += buffer_bytes, std::swap(buffer, other)) {
    const size_t some = std::min(buffer_bytes, bytes - begin);
    cuda::Address at = buffer;
    if (!sends) meet();
    if (sends) {
      operation.in.ForEach(begin, some, [&](const char* data, size_t part) {
        rank.stream.Copy(at, cuda::AddressOf(data), part);
        at += part;
      });
    } else {
      operation.out.ForEach(begin, some, [&](char* data, size_t part) {
        rank.stream.Copy(cuda::AddressOf(data), at, part);
        at += part;
      });
    }
    settle();
    if (sends) meet();
  }
}

}  // namespace tfdist
