// Valid and invalid bytes from a peer on a control connection; also the entry point of a fuzzer.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "control/watch.h"

namespace {

using tfdist::Frame;
using tfdist::FrameKind;
using tfdist::FrameReader;

Frame Sample(int i) {
  Frame frame;
  frame.kind = static_cast<FrameKind>(1 + i % 5);
  frame.code = tfdist::Code::kMismatch;
  if (frame.kind == FrameKind::kAbort) {
    frame.event = tfdist::Event::kSilent;
    frame.worker = "worker 1 (b:1)";
    frame.message = "a reason";
    return frame;
  }
  if (frame.kind == FrameKind::kWaited) {
    frame.message = "what waits";
    return frame;
  }
  if (frame.kind == FrameKind::kFailure) {
    frame.failures = static_cast<uint8_t>(i);
    frame.event = tfdist::Event::kFailed;
    frame.message = "another reason";
    return frame;
  }
  frame.status.sequence = static_cast<uint64_t>(i);
  frame.status.active = i % 2 == 0;
  frame.status.fingerprint.SetName("gradients");
  frame.sent = (int64_t{1} << 61) - 1;
  frame.echoed = i;
  frame.echo_received = 1700000000;
  return frame;
}

void Expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

// Feeds arbitrary bytes in pieces. The reader must stay within bounds, and its frames must be
// describable.
void FeedAnything(const uint8_t* data, size_t size) {
  FrameReader reader;
  size_t at = 0;
  while (at < size) {
    const size_t piece = 1 + data[at] % 64;
    const size_t bytes = piece < size - at ? piece : size - at;
    const bool fine =
        reader.Feed(reinterpret_cast<const char*>(data) + at, bytes, [](const Frame& frame) {
          (void)Describe(frame.status.fingerprint);
          (void)tfdist::Encode(frame);
        });
    if (!fine) return;
    at += bytes;
  }
}

void RoundTrips() {
  std::string bytes;
  for (int i = 0; i < 9; ++i) bytes += Encode(Sample(i));
  for (size_t piece = 1; piece < bytes.size(); piece += 7) {
    FrameReader reader;
    int seen = 0;
    for (size_t at = 0; at < bytes.size(); at += piece) {
      const size_t length = std::min(piece, bytes.size() - at);
      Expect(reader.Feed(bytes.data() + at, length,
                         [&](const Frame& frame) {
                           Expect(Encode(frame) == Encode(Sample(seen)), "A frame changed.");
                           ++seen;
                         }),
             "A right frame was refused.");
    }
    Expect(seen == 9, "A frame was lost.");
  }
}

Frame Decoded(const Frame& sent) {
  const std::string bytes = Encode(sent);
  Frame decoded;
  int seen = 0;
  FrameReader reader;
  const bool fine = reader.Feed(bytes.data(), bytes.size(), [&](const Frame& frame) {
    decoded = frame;
    ++seen;
  });
  Expect(fine && seen == 1, "A frame was lost.");
  return decoded;
}

// Times out of the clock's range count as none.
void Times() {
  for (const int64_t wrong : {INT64_MIN, int64_t{-1}, int64_t{1} << 61, INT64_MAX}) {
    for (const auto time : {&Frame::sent, &Frame::echoed, &Frame::echo_received}) {
      Frame frame = Sample(5);
      frame.*time = wrong;
      frame = Decoded(frame);
      Expect(frame.*time == 0, "A time that no clock shows was taken.");
      Expect((frame.sent == 0) + (frame.echoed == 0) + (frame.echo_received == 0) == 1,
             "A right time was lost.");
    }
  }
}

// The description of a wait is truncated and made printable.
void Waited() {
  Frame frame = Sample(4);
  Expect(frame.kind == FrameKind::kWaited, "The sample is another one.");
  frame.message = "all_reduce\n\x1b[2J" + std::string(1 << 20, 'x');
  const Frame decoded = Decoded(frame);
  Expect(decoded.kind == FrameKind::kWaited, "The kind has changed.");
  Expect(decoded.message == "all_reduce??[2J" + decoded.message.substr(15),
         "What a terminal obeys was let through.");
  Expect(decoded.message.size() == tfdist::kMaxMessageBytes, "A message was not cut.");
}

// The worker of an abort is cut to the maximum length, and stays separate from the message, even if
// both contain line ends.
void Causes() {
  Frame frame = Sample(1);
  Expect(frame.kind == FrameKind::kAbort, "The sample is another one.");
  frame.worker = "worker\n\x1b" + std::string(1 << 20, 'x');
  frame.message = "one\ntwo";
  const Frame decoded = Decoded(frame);
  Expect(decoded.event == frame.event, "The event has changed.");
  Expect(decoded.worker == "worker??" + decoded.worker.substr(8), "A worker was not printable.");
  Expect(decoded.worker.size() == tfdist::kMaxNameBytes, "A worker was not cut.");
  Expect(decoded.message == "one?two", "A message was cut in two.");
}

void Refusals() {
  const std::string wrong[] = {
      std::string(8, '\xff'),                               // no kind
      std::string("GET / HT"),                              // another protocol
      std::string("\x01\x00\x00\x00\xff\xff\xff\x7f", 8),   // a status of two gigabytes
      std::string("\x02\x01\x00\x00\x00\x00\x10\x00", 8),   // an abort of a megabyte
      std::string("\x02\x00\x00\x00\x01\x00\x00\x00x", 9),  // an abort without a reason's code
      std::string("\x02\x03\x00\x05\x01\x00\x00\x00x", 9),  // an abort with an invalid event
      std::string("\x05\x00\x00\x01\x01\x00\x00\x00x", 9),  // a wait with an event
      std::string("\x05\x00\x00\x00\x00\x00\x10\x00", 8),   // a description of a megabyte
      std::string("\x06\x00\x00\x00\x00\x00\x00\x00", 8),   // a kind out of range
  };
  for (const auto& bytes : wrong) {
    FrameReader reader;
    Expect(!reader.Feed(bytes.data(), bytes.size(), [](const Frame&) {}), "Garbage was taken.");
    Expect(!reader.Feed("", 0, [](const Frame&) {}), "A broken stream was taken up again.");
  }
}

void Garbage(int rounds) {
  std::mt19937 random(1);
  for (int round = 0; round < rounds; ++round) {
    std::vector<uint8_t> bytes(random() % 512);
    for (auto& byte : bytes) byte = static_cast<uint8_t>(random());
    if (round % 2) {
      // Valid frames with one changed byte.
      const std::string right = Encode(Sample(round)) + Encode(Sample(round + 1));
      bytes.assign(right.begin(), right.end());
      bytes[random() % bytes.size()] = static_cast<uint8_t>(random());
    }
    FeedAnything(bytes.data(), bytes.size());
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
  RoundTrips();
  Times();
  Waited();
  Causes();
  Refusals();
  Garbage(argc > 1 ? std::atoi(argv[1]) : 20000);
  std::printf("frames: ok\n");
}
#endif
