#include "cpp/alone.h"

#include <cstdio>
#include <cstdlib>
#include <new>

#include "transport/fabric.h"
#include "transport/socket.h"

namespace tfdist::testing {
namespace {

constexpr size_t kMaxMemory = 1 << 20;

Fabric Make(const std::vector<int>& hosts, Guard& guard, Recorder& recorder) {
  Fabric fabric{Topology::From(0, {"rank 0", "rank 1"}, hosts), nullptr, {}, guard, recorder};
  fabric.links.push_back(nullptr);
  return fabric;
}

void Dispatch(Fabric& fabric, Operation& operation, Algorithm algorithm) {
  switch (operation.fingerprint.kind) {
    case Kind::kAllReduce:
      return AllReduce(fabric, operation, algorithm);
    case Kind::kReduceScatter:
      return ReduceScatter(fabric, operation);
    case Kind::kAllGather:
      return AllGather(fabric, operation);
    case Kind::kBroadcast:
      return Broadcast(fabric, operation);
    case Kind::kAllToAll:
      return AllToAll(fabric, operation);
    case Kind::kBarrier:
      return Barrier(fabric, operation);
    case Kind::kSend:
      return SendTo(fabric, operation);
    case Kind::kReceive:
      return ReceiveFrom(fabric, operation);
  }
}

}  // namespace

Alone::Alone(int descriptor) : fabric(Make({0, 1}, guard, recorder)) {
  fabric.host = std::make_unique<Host>(nullptr, 0, std::vector<int>{0},
                                       std::vector<std::string>{"rank 0"}, guard, recorder);
  fabric.links.push_back(
      std::make_unique<SocketLink>(std::make_unique<Socket>(descriptor), "rank 1"));
}

Alone::Alone(std::unique_ptr<Segment> segment) : fabric(Make({0, 0}, guard, recorder)) {
  fabric.host = std::make_unique<Host>(std::move(segment), 0, std::vector<int>{0, 1},
                                       fabric.topology.names, guard, recorder);
  fabric.links.push_back(std::make_unique<RingLink>(*fabric.host, 1));
}

Request::Request(Kind kind, size_t count, bool allocates) : in(2 * count), out(2 * count) {
  Fingerprint& f = operation.fingerprint;
  f.kind = kind;
  f.type = DType::kFloat32;
  f.sequence = 1;
  f.SetName("gradients");
  f.root = kind == Kind::kBroadcast ? 1 : 0;
  const size_t bytes = count * sizeof(float);
  const bool twice_in = kind == Kind::kReduceScatter || kind == Kind::kAllToAll;
  const bool twice_out = kind == Kind::kAllGather || kind == Kind::kAllToAll;
  operation.peer = 1;
  operation.in = ConstBufferList(reinterpret_cast<char*>(in.data()), twice_in ? 2 * bytes : bytes);
  operation.out = BufferList(reinterpret_cast<char*>(out.data()), twice_out ? 2 * bytes : bytes);
  operation.row_bytes = sizeof(float);
  operation.sent_rows = operation.received_rows = {count, count};
  if (!allocates) return;
  operation.received_rows.clear();
  operation.allocate = [this](const std::vector<size_t>& rows) {
    constexpr size_t kMaxRows = static_cast<size_t>(PTRDIFF_MAX) / sizeof(float);
    if (rows[0] > kMaxRows || rows[1] > kMaxRows - rows[0]) std::abort();
    const size_t total = (rows[0] + rows[1]) * sizeof(float);
    if (total > kMaxMemory) throw std::bad_alloc();
    room.resize(total);
    return BufferList(room.data(), total);
  };
}

Fingerprint Counterpart(const Fingerprint& fingerprint) {
  Fingerprint theirs = fingerprint;
  if (theirs.kind == Kind::kSend) {
    theirs.kind = Kind::kReceive;
  } else if (theirs.kind == Kind::kReceive) {
    theirs.kind = Kind::kSend;
  }
  return theirs;
}

std::string Run(Fabric& fabric, Operation& operation, Algorithm algorithm) {
  try {
    Dispatch(fabric, operation, algorithm);
    return "";
  } catch (const Error& error) { return error.what(); }
}

void Expect(bool condition, const std::string& what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

std::string Number(uint64_t value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

}  // namespace tfdist::testing
