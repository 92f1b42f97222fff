#include "transport/fabric.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "error.h"

namespace tfdist {
namespace {

// See host.cc.
constexpr auto kInOrder = std::memory_order_seq_cst;

}  // namespace

RingLink::RingLink(Host& host, int other) : host_(host), other_(other) {}

size_t RingLink::Write(const char* data, size_t bytes) {
  Segment& segment = host_.segment();
  Ring& ring = segment.ring(host_.rank(), other_);
  const size_t room = segment.ring_bytes();
  const uint64_t written = ring.written.load(std::memory_order_relaxed);
  // The other rank writes `ring.read`, so this rank must not trust the value. Even if the value is
  // wrong, the number of unread bytes cannot exceed the size of the ring.
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

namespace {

// The maximum number of bytes per call. It is small enough that received data is still in the
// caches when it is used, and that the other links need not wait long.
constexpr size_t kMaxBytes = 256 << 10;

}  // namespace

SocketLink::SocketLink(std::unique_ptr<Stream> stream, std::string name)
    : stream_(std::move(stream)), name_(std::move(name)) {}

size_t SocketLink::Write(const char* data, size_t bytes) {
  const ssize_t sent = stream_->Write(data, std::min(bytes, kMaxBytes));
  if (sent >= 0) {
    sent_bytes += static_cast<uint64_t>(sent);
    return static_cast<size_t>(sent);
  }
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return 0;
  throw Error(Code::kUnavailable,
              name_ + " cannot be reached any more: " + std::strerror(errno) + ".", Event::kLost,
              name_);
}

size_t SocketLink::Read(char* data, size_t bytes) {
  const ssize_t got = stream_->Read(data, std::min(bytes, kMaxBytes));
  if (got > 0) {
    received_bytes += static_cast<uint64_t>(got);
    return static_cast<size_t>(got);
  }
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return 0;
  throw Error(Code::kUnavailable,
              name_ + (got == 0 ? " has closed the connection."
                                : std::string(" cannot be reached any more: ") +
                                      std::strerror(errno) + "."),
              Event::kLost, name_);
}

Topology Topology::From(int rank, std::vector<std::string> names,
                        const std::vector<int>& host_ids) {
  Topology topology;
  topology.rank = rank;
  topology.size = static_cast<int>(names.size());
  topology.names = std::move(names);
  std::vector<int> seen;
  for (int other = 0; other < topology.size; ++other) {
    const int id = host_ids[static_cast<size_t>(other)];
    const auto found = std::find(seen.begin(), seen.end(), id);
    const auto host = static_cast<size_t>(found - seen.begin());
    if (found == seen.end()) {
      seen.push_back(id);
      topology.hosts.emplace_back();
    }
    topology.host_of.push_back(static_cast<int>(host));
    topology.place_of.push_back(static_cast<int>(topology.hosts[host].size()));
    topology.hosts[host].push_back(other);
  }
  return topology;
}

}  // namespace tfdist
