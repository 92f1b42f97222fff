#include "transport/ring_link.h"

#include <algorithm>
#include <cstring>

namespace tfdist {
namespace {

// See the progress counts in host.cc.
constexpr auto kInOrder = std::memory_order_seq_cst;

}  // namespace

RingLink::RingLink(Host& host, int other) : host_(host), other_(other) {}

size_t RingLink::Write(const char* data, size_t bytes) {
  Segment& segment = host_.segment();
  Ring& ring = segment.ring(host_.rank(), other_);
  const size_t room = segment.ring_bytes();
  const uint64_t written = ring.written.load(std::memory_order_relaxed);
  // The other rank's count is not believed further than the memory goes.
  const uint64_t unread = std::min<uint64_t>(written - ring.read.load(kInOrder), room);
  const size_t taken = std::min(bytes, room - static_cast<size_t>(unread));
  if (taken == 0) return 0;
  char* memory = segment.ring_data(host_.rank(), other_);
  const size_t begin = written % room;
  const size_t first = std::min(taken, room - begin);
  std::memcpy(memory + begin, data, first);
  std::memcpy(memory, data + first, taken - first);
  ring.written.store(written + taken, kInOrder);
  host_.copied_bytes += taken;
  host_.Wake(other_);
  return taken;
}

size_t RingLink::Read(char* data, size_t bytes) {
  Segment& segment = host_.segment();
  Ring& ring = segment.ring(other_, host_.rank());
  const size_t room = segment.ring_bytes();
  const uint64_t read = ring.read.load(std::memory_order_relaxed);
  const size_t ready = static_cast<size_t>(ring.written.load(kInOrder) - read);
  const size_t taken = std::min({bytes, ready, room});
  if (taken == 0) return 0;
  const char* memory = segment.ring_data(other_, host_.rank());
  const size_t begin = read % room;
  const size_t first = std::min(taken, room - begin);
  std::memcpy(data, memory + begin, first);
  std::memcpy(data + first, memory, taken - first);
  ring.read.store(read + taken, kInOrder);
  host_.Wake(other_);
  return taken;
}

}  // namespace tfdist
