// What a peer sends on a data connection, right and wrong: an Error at the worst. Also the entry
// point of a fuzzer; with clang, from tfdist/csrc, for an hour:
//
//   clang++ -std=c++17 -g -O1 -fsanitize=fuzzer,address,undefined -DTFDIST_FUZZER -pthread -I.
//     tests/data_test.cc [a-eg-z]*.cc collective/*.cc control/*.cc reduce/*.cc transport/*.cc
//     -o /tmp/data_fuzzer && /tmp/data_fuzzer -max_total_time=3600 -timeout=10 -rss_limit_mb=512
//
// (With fingerprint.cc; and tests/frames_test.cc in the place of tests/data_test.cc for the control
// connections.) Without clang: data_test ROUNDS, compiled with -fsanitize=address,undefined.
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "collective/collectives.h"
#include "error.h"
#include "transport/fabric.h"
#include "transport/socket_link.h"

namespace {

using namespace tfdist;

constexpr size_t kCount = 24;  // floats that each rank brings, for each rank where that matters
constexpr size_t kMostMemory = 1 << 20;

// A wait that lasts has failed: all that will ever come lies in the socket.
struct Impatient : Guard {
  void Check() override { throw Error(Code::kUnavailable, "It would wait for ever."); }
};

// Rank 0 of two on two hosts, and what it was asked for.
struct Rank {
  explicit Rank(int descriptor)
      : fabric{Topology::From(0, {"rank 0", "rank 1"}, {0, 1}), nullptr, {}, guard} {
    fabric.host = std::make_unique<Host>(nullptr, 0, std::vector<std::string>{"rank 0"}, guard);
    fabric.links.push_back(nullptr);
    fabric.links.push_back(std::make_unique<SocketLink>(descriptor, "rank 1"));
  }
  Impatient guard;
  Fabric fabric;
};

struct Call {
  Call(Kind kind, bool allocates) : in(2 * kCount), out(2 * kCount) {
    Fingerprint& f = operation.fingerprint;
    f.kind = kind;
    f.type = DType::kFloat32;
    f.sequence = 1;
    f.SetName("gradients");
    f.root = kind == Kind::kBroadcast ? 1 : 0;
    const size_t bytes = kCount * sizeof(float);
    const bool twice_in = kind == Kind::kReduceScatter || kind == Kind::kAllToAll;
    const bool twice_out = kind == Kind::kAllGather || kind == Kind::kAllToAll;
    operation.peer = 1;
    operation.in = ConstPieces(reinterpret_cast<char*>(in.data()), twice_in ? 2 * bytes : bytes);
    operation.out = Pieces(reinterpret_cast<char*>(out.data()), twice_out ? 2 * bytes : bytes);
    operation.sent_bytes = operation.received_bytes = {bytes, bytes};
    if (!allocates) return;
    operation.received_bytes.clear();
    operation.allocate = [this](const std::vector<size_t>& sizes) {
      const size_t total = sizes[0] + sizes[1];
      if (total < sizes[0] || total > static_cast<size_t>(PTRDIFF_MAX)) std::abort();
      if (total > kMostMemory) throw std::bad_alloc();
      room.resize(total);
      return Pieces(room.data(), total);
    };
  }
  std::vector<float> in, out;
  std::vector<char> room;
  Operation operation;
};

void Dispatch(Fabric& fabric, Operation& operation, Algorithm algorithm) {
  switch (operation.fingerprint.kind) {
    case Kind::kAllReduce: return AllReduce(fabric, operation, algorithm);
    case Kind::kReduceScatter: return ReduceScatter(fabric, operation);
    case Kind::kAllGather: return AllGather(fabric, operation);
    case Kind::kBroadcast: return Broadcast(fabric, operation);
    case Kind::kAllToAll: return AllToAll(fabric, operation);
    case Kind::kBarrier: return Barrier(fabric, operation);
    case Kind::kSend: return SendTo(fabric, operation);
    case Kind::kReceive: return ReceiveFrom(fabric, operation);
  }
}

constexpr Algorithm kAlgorithms[] = {Algorithm::kAuto, Algorithm::kWhole, Algorithm::kDirect,
                                     Algorithm::kRing};

// The first byte chooses a collective, the second an algorithm and how much of what follows is
// preceded by a right fingerprint. Returns what was thrown, or nothing.
std::string FeedAnything(const uint8_t* data, size_t size) {
  if (size < 2) return "";
  const auto kind = static_cast<Kind>(data[0] % kKinds);
  const bool greets = data[1] & 4, greets_twice = data[1] & 8, allocates = data[1] & 16;
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) std::abort();
  Rank rank(ends[0]);
  Call call(kind, allocates);
  Fingerprint theirs = call.operation.fingerprint;
  if (kind == Kind::kSend) theirs.kind = Kind::kReceive;
  if (kind == Kind::kReceive) theirs.kind = Kind::kSend;
  const std::string greeting(reinterpret_cast<const char*>(&theirs), sizeof(theirs));
  std::string bytes(reinterpret_cast<const char*>(data) + 2, size - 2);
  // The sizes come first, in an exchange of their own.
  if (greets_twice && bytes.size() >= 8) bytes.insert(8, greeting);
  if (greets) bytes.insert(0, greeting);
  if (send(ends[1], bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0) std::abort();
  shutdown(ends[1], SHUT_WR);
  std::string thrown;
  try {
    Dispatch(rank.fabric, call.operation, kAlgorithms[data[1] & 3]);
  } catch (const Error& error) {
    thrown = error.what();
  }
  close(ends[1]);
  return thrown;
}

void Expect(bool condition, const std::string& what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

std::string Number(uint64_t value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

std::string Feed(Kind kind, int how, const std::string& bytes) {
  const std::string all = std::string{static_cast<char>(kind), static_cast<char>(how)} + bytes;
  return FeedAnything(reinterpret_cast<const uint8_t*>(all.data()), all.size());
}

constexpr int kGreets = 4, kGreetsTwice = 8, kAllocates = 16;

void RightBytesAreTaken() {
  constexpr size_t kBytes = kCount * sizeof(float);
  const std::string values(2 * kBytes, '\0');
  for (const Kind kind : {Kind::kAllGather, Kind::kAllToAll}) {
    for (const int how : {0, kAllocates}) {
      const std::string thrown =
          Feed(kind, how | kGreets | kGreetsTwice, Number(kBytes) + values.substr(0, kBytes));
      Expect(thrown.empty(), "Right bytes were refused: " + thrown);
    }
  }
  for (const Kind kind : {Kind::kReduceScatter, Kind::kBroadcast, Kind::kReceive, Kind::kSend,
                          Kind::kBarrier, Kind::kAllReduce}) {
    const std::string thrown = Feed(kind, kGreets, values);
    Expect(thrown.empty(), "Right bytes were refused: " + thrown);
  }
}

void HugeSizesAreRefused() {
  struct Case {
    uint64_t bytes;
    const char* word;
  };
  const Case cases[] = {{uint64_t{1} << 62, "no room for"},
                        {uint64_t{1} << 40, "no room for"},
                        {uint64_t{1} << 63, "more than any memory holds"},
                        {~uint64_t{0} - 63, "more than any memory holds"},
                        {uint64_t(PTRDIFF_MAX) - 63, "more than any memory holds"},
                        {97, "a part of one"}};
  for (const Kind kind : {Kind::kAllGather, Kind::kAllToAll}) {
    for (const auto& [bytes, word] : cases) {
      const std::string thrown =
          Feed(kind, kGreets | kGreetsTwice | kAllocates, Number(bytes) + "data");
      Expect(thrown.find(word) != std::string::npos,
             std::to_string(bytes) + " bytes: '" + thrown + "' lacks '" + word + "'");
      Expect(thrown.find("rank ") != std::string::npos, "No rank is named: " + thrown);
      Expect(Feed(kind, kGreets, Number(bytes)).find("expects 24") != std::string::npos,
             "An unexpected size was taken.");
    }
  }
}

void Garbage(int rounds) {
  std::mt19937 random(1);
  for (int round = 0; round < rounds; ++round) {
    std::string bytes(random() % 700, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    // Often a size that could be right, so that what follows it is looked at.
    if (random() % 2) bytes = Number(random() % 2 ? 96 : random() % 4096) + bytes;
    const std::string thrown =
        Feed(static_cast<Kind>(random() % kKinds), static_cast<int>(random() % 32), bytes);
    Expect(thrown.find("wait for ever") == std::string::npos, "It waited: " + thrown);
  }
}

}  // namespace

#ifdef TFDIST_FUZZER
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 4096) FeedAnything(data, size);
  return 0;
}
#else
int main(int argc, char** argv) {
  RightBytesAreTaken();
  HugeSizesAreRefused();
  Garbage(argc > 1 ? std::atoi(argv[1]) : 20000);
  std::printf("data: ok\n");
}
#endif
