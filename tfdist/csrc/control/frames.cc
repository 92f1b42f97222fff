#include "control/frames.h"

#include <cstring>

namespace tfdist {
namespace {

struct Header {
  uint8_t kind;
  uint8_t code;
  uint8_t active;
  uint8_t zero;
  uint32_t bytes;  // that follow
};
static_assert(sizeof(Header) == 8);

struct StatusBody {
  uint64_t sequence;
  int32_t peer;
  uint32_t progress;
  int64_t sent;
  int64_t echoed;
  int64_t echo_received;
  Fingerprint fingerprint;
};
static_assert(sizeof(StatusBody) == 40 + sizeof(Fingerprint));

// No clock of this century counts further; sums of a few such times do not overflow.
int64_t Time(int64_t nanoseconds) {
  constexpr int64_t kMost = int64_t{1} << 61;
  return nanoseconds > 0 && nanoseconds < kMost ? nanoseconds : 0;
}

// It will be printed: no line ends, nothing that a terminal obeys, also in UTF-8.
void MakePrintable(std::string* text) {
  unsigned char last = 0;
  for (char& c : *text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < ' ' || byte == 127 || (last == 0xC2 && byte >= 0x80 && byte < 0xA0)) c = '?';
    last = byte;
  }
}

bool Fits(const Header& header) {
  if (header.zero != 0 || header.active > 1) return false;
  switch (static_cast<FrameKind>(header.kind)) {
    case FrameKind::kStatus:
    case FrameKind::kFarewell:
      return header.bytes == sizeof(StatusBody);
    case FrameKind::kAbort:
      return header.bytes <= kLongestMessage &&
             header.code >= static_cast<int>(Code::kInvalidArgument) &&
             header.code <= static_cast<int>(Code::kInternal);
    case FrameKind::kFailure:
    case FrameKind::kWaited:
      return header.bytes <= kLongestMessage;
  }
  return false;
}

bool HasStatus(FrameKind kind) {
  return kind == FrameKind::kStatus || kind == FrameKind::kFarewell;
}

Frame Decode(const Header& header, const char* body) {
  Frame frame;
  frame.kind = static_cast<FrameKind>(header.kind);
  if (!HasStatus(frame.kind)) {
    if (frame.kind == FrameKind::kAbort) frame.code = static_cast<Code>(header.code);
    if (frame.kind == FrameKind::kFailure) frame.failures = header.code;
    frame.message.assign(body, header.bytes);
    MakePrintable(&frame.message);
    return frame;
  }
  StatusBody status;
  std::memcpy(&status, body, sizeof(status));
  frame.status = {status.sequence, header.active == 1, status.peer, status.progress,
                  status.fingerprint};
  frame.sent = Time(status.sent);
  frame.echoed = Time(status.echoed);
  frame.echo_received = Time(status.echo_received);
  return frame;
}

}  // namespace

std::string Encode(const Frame& frame) {
  const bool abort = frame.kind == FrameKind::kAbort;
  const bool failure = frame.kind == FrameKind::kFailure;
  std::string body;
  if (!HasStatus(frame.kind)) {
    body = frame.message.substr(0, kLongestMessage);
  } else {
    const StatusBody status{frame.status.sequence, frame.status.peer, frame.status.progress,
                            frame.sent,            frame.echoed,      frame.echo_received,
                            frame.status.fingerprint};
    body.assign(reinterpret_cast<const char*>(&status), sizeof(status));
  }
  const int code = abort ? static_cast<int>(frame.code) : failure ? frame.failures : 0;
  const Header header{static_cast<uint8_t>(frame.kind), static_cast<uint8_t>(code),
                      static_cast<uint8_t>(frame.status.active ? 1 : 0), 0,
                      static_cast<uint32_t>(body.size())};
  return std::string(reinterpret_cast<const char*>(&header), sizeof(header)) + body;
}

bool FrameReader::Feed(const char* data, size_t bytes,
                       const std::function<void(const Frame&)>& use) {
  if (broken_) return false;
  buffer_.append(data, bytes);
  size_t at = 0;
  while (buffer_.size() - at >= sizeof(Header)) {
    Header header;
    std::memcpy(&header, buffer_.data() + at, sizeof(header));
    if (!Fits(header)) {
      broken_ = true;
      return false;
    }
    if (buffer_.size() - at - sizeof(header) < header.bytes) break;
    use(Decode(header, buffer_.data() + at + sizeof(header)));
    at += sizeof(header) + header.bytes;
  }
  buffer_.erase(0, at);
  return true;
}

}  // namespace tfdist
