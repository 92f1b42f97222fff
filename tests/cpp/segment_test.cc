// Valid and invalid contents of shared memory from a peer on the same host: at worst an Error, and
// no access out of bounds. Also the entry point of a fuzzer.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>

#include "cpp/alone.h"

namespace {

using namespace tfdist;
using namespace tfdist::testing;

// Reads a fuzzer's bytes; zeros after their end.
class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  void Take(void* to, size_t bytes) {
    std::memset(to, 0, bytes);
    const size_t some = std::min(bytes, size_);
    std::memcpy(to, data_, some);
    data_ += some;
    size_ -= some;
  }
  uint8_t Byte() {
    uint8_t value;
    Take(&value, 1);
    return value;
  }
  // Mostly a small number, as a valid one would be.
  uint64_t Count() {
    const uint8_t how = Byte();
    if (how < 200) return how % 16;
    uint64_t value;
    Take(&value, sizeof(value));
    return value;
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

// Heap memory, so that a sanitizer sees its end. Only the progress of ranks must be zero at the
// start.
class Memory {
 public:
  Memory()
      : bytes_(Segment::BytesFor(2)), data_(static_cast<char*>(std::aligned_alloc(4096, bytes_))) {
    Segment segment(data_, bytes_, 2);
    counts_ = static_cast<size_t>(segment.ring_data(0, 0) - data_);
  }
  ~Memory() { std::free(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::unique_ptr<Segment> Make() {
    std::memset(data_, 0, counts_);
    return std::make_unique<Segment>(data_, bytes_, 2);
  }

 private:
  const size_t bytes_;
  char* const data_;
  size_t counts_;
};

constexpr Algorithm kAlgorithms[] = {Algorithm::kAuto, Algorithm::kOneShot, Algorithm::kTwoShot,
                                     Algorithm::kRing};

// The first byte selects a collective, the second its size and algorithm; the others become the
// contents from rank 1. Returns the message of the Error, or nothing.
std::string FeedAnything(const uint8_t* data, size_t size) {
  static Memory memory;
  Bytes bytes(data, size);
  const auto kind = static_cast<Kind>(bytes.Byte() % kKinds);
  const uint8_t how = bytes.Byte();
  Alone alone(memory.Make());
  Segment& segment = alone.fabric.host->segment();
  Request request(kind, how & 4 ? kCount : 3000, how & 8);
  const Fingerprint theirs = Counterpart(request.operation.fingerprint);
  const bool is_message = kind == Kind::kSend || kind == Kind::kReceive;

  EagerSlot& slot = segment.slot(1, 1);
  bytes.Take(slot.data, 16);
  if (how & 16) {
    slot.fingerprint = theirs;
  } else {
    bytes.Take(&slot.fingerprint, sizeof(slot.fingerprint));
  }
  Progress& progress = segment.progress(1);
  progress.arrived = bytes.Count();
  progress.published = bytes.Count();
  progress.reduced = bytes.Count();
  progress.finished = bytes.Count();
  Ring& from = segment.ring(1, 0);
  Ring& to = segment.ring(0, 1);
  from.written = is_message ? sizeof(theirs) + bytes.Count() * 100 : bytes.Count() * 100;
  to.read = bytes.Count();
  char* stream = segment.ring_data(1, 0);
  std::memcpy(stream, &theirs, sizeof(theirs));
  stream += sizeof(theirs);
  bytes.Take(stream, sizeof(uint64_t));
  stream += sizeof(uint64_t);
  // The sizes precede the data, in a separate exchange.
  if (how & 32) std::memcpy(stream, &theirs, sizeof(theirs));
  bytes.Take(stream + (how & 32 ? sizeof(theirs) : 0), 256);
  return Run(alone.fabric, request.operation, kAlgorithms[how & 3]);
}

void RightBytesAreTaken() {
  for (int kind = 0; kind < kKinds; ++kind) {
    for (const uint8_t small : {4, 0}) {
      // All data arrived long ago.
      std::string bytes{static_cast<char>(kind), static_cast<char>(32 | 16 | small)};
      const size_t own = small ? kCount : 3000;
      bytes += Number(own) + std::string(8, '\0');
      bytes += "\x01\x0f\x0f\x0f";                         // arrived, published, reduced, finished
      bytes += std::string("\xff") + Number(1000) + '\0';  // written, read
      bytes += Number(own);
      const std::string thrown =
          FeedAnything(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
      Expect(thrown.empty(), std::string(NameOf(static_cast<Kind>(kind))) +
                                 ": right bytes were refused: " + thrown);
    }
  }
}

// More data than the ring holds, to a peer that claims to have read data that were never written.
void NoMoreIsWrittenThanThereIsRoomFor() {
  for (const uint64_t read : {uint64_t{1}, uint64_t{1} << 30, ~uint64_t{0}}) {
    Memory memory;
    Alone alone(memory.Make());
    alone.fabric.host->segment().ring(0, 1).read = read;
    Request request(Kind::kSend, size_t{4} << 20, false);
    const std::string thrown = Run(alone.fabric, request.operation, Algorithm::kAuto);
    Expect(thrown.find("wait for ever") != std::string::npos, "It was all sent.");
  }
}

void Garbage(int rounds) {
  std::mt19937 random(1);
  for (int round = 0; round < rounds; ++round) {
    std::string bytes(random() % 400, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    FeedAnything(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  }
}

}  // namespace

#ifdef TFDIST_FUZZER
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FeedAnything(data, size);
  return 0;
}
#else
int main(int argc, char** argv) {
  RightBytesAreTaken();
  NoMoreIsWrittenThanThereIsRoomFor();
  Garbage(argc > 1 ? std::atoi(argv[1]) : 20000);
  std::printf("segment: ok\n");
}
#endif
