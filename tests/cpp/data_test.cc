// Valid and invalid bytes from a peer on a data connection, which cause at worst an Error. Also the
// entry point of a fuzzer.
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

#include "cpp/alone.h"

namespace {

using namespace tfdist;
using namespace tfdist::testing;

constexpr Algorithm kAlgorithms[] = {Algorithm::kAuto, Algorithm::kOneShot, Algorithm::kTwoShot,
                                     Algorithm::kRing};

// The first byte selects a collective, the second an algorithm and how much of the rest is preceded
// by a valid fingerprint. Returns the message of the Error, or nothing.
std::string FeedAnything(const uint8_t* data, size_t size) {
  if (size < 2) return "";
  const auto kind = static_cast<Kind>(data[0] % kKinds);
  const bool greets = data[1] & 4, greets_twice = data[1] & 8, allocates = data[1] & 16;
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) std::abort();
  Alone alone(ends[0]);
  Request request(kind, kCount, allocates);
  const Fingerprint theirs = Counterpart(request.operation.fingerprint);
  const std::string greeting(reinterpret_cast<const char*>(&theirs), sizeof(theirs));
  std::string bytes(reinterpret_cast<const char*>(data) + 2, size - 2);
  // The sizes precede the data, in a separate exchange.
  if (greets_twice && bytes.size() >= 8) bytes.insert(8, greeting);
  if (greets) bytes.insert(0, greeting);
  if (send(ends[1], bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0) std::abort();
  shutdown(ends[1], SHUT_WR);
  const std::string thrown = Run(alone.fabric, request.operation, kAlgorithms[data[1] & 3]);
  close(ends[1]);
  return thrown;
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
          Feed(kind, how | kGreets | kGreetsTwice, Number(kCount) + values.substr(0, kBytes));
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
    uint64_t rows;
    const char* word;
  };
  const Case cases[] = {{uint64_t{1} << 60, "no room for"},
                        {uint64_t{1} << 40, "no room for"},
                        {uint64_t{1} << 63, "more than any memory holds"},
                        {~uint64_t{0} - 63, "more than any memory holds"},
                        {uint64_t(PTRDIFF_MAX) / 4 - 15, "more than any memory holds"}};
  for (const Kind kind : {Kind::kAllGather, Kind::kAllToAll}) {
    for (const auto& [rows, word] : cases) {
      const std::string thrown =
          Feed(kind, kGreets | kGreetsTwice | kAllocates, Number(rows) + "data");
      Expect(thrown.find(word) != std::string::npos,
             std::to_string(rows) + " rows: '" + thrown + "' lacks '" + word + "'");
      Expect(thrown.find("rank ") != std::string::npos, "No rank is named: " + thrown);
      Expect(Feed(kind, kGreets, Number(rows)).find("expects 24") != std::string::npos,
             "An unexpected size was taken.");
    }
  }
}

void Garbage(int rounds) {
  std::mt19937 random(1);
  for (int round = 0; round < rounds; ++round) {
    std::string bytes(random() % 700, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    // Often a plausible size, so that the following bytes are read.
    if (random() % 2) bytes = Number(random() % 2 ? kCount : random() % 4096) + bytes;
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
