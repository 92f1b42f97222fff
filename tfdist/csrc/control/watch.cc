#include "control/watch.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "control/activity.h"

namespace tfdist {
namespace {

struct Header {
  uint8_t kind;
  uint8_t code;
  uint8_t active;
  uint8_t event;
  uint32_t bytes;  // the length of the payload
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

// Returns a time that a peer has sent, or 0 if the time is invalid. A valid time is positive and
// less than 2^61 ns, which is 73 years after the machine started. The sum of a few valid times does
// not overflow.
int64_t Time(int64_t nanoseconds) {
  constexpr int64_t kMax = int64_t{1} << 61;
  return nanoseconds > 0 && nanoseconds < kMax ? nanoseconds : 0;
}

// Makes text safe to print on a terminal. Replaces line ends and other control characters with
// question marks, including the control characters that UTF-8 encodes with two bytes.
void MakePrintable(std::string* text) {
  unsigned char last = 0;
  for (char& c : *text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < ' ' || byte == 127 || (last == 0xC2 && byte >= 0x80 && byte < 0xA0)) c = '?';
    last = byte;
  }
}

// The body of an abort or failure frame consists of the worker's name, this byte, and the message.
// The name does not contain this byte, so the first such byte marks the end of the name.
constexpr char kAfterWorker = '\n';
constexpr size_t kMaxCauseBytes = kMaxNameBytes + 1 + kMaxMessageBytes;

bool Fits(const Header& header) {
  const auto kind = static_cast<FrameKind>(header.kind);
  const bool has_cause = kind == FrameKind::kAbort || kind == FrameKind::kFailure;
  if (header.active > 1 || header.event >= (has_cause ? kEvents : 1)) return false;
  switch (kind) {
    case FrameKind::kStatus:
    case FrameKind::kFarewell:
      return header.bytes == sizeof(StatusBody);
    case FrameKind::kAbort:
      return header.bytes <= kMaxCauseBytes &&
             header.code >= static_cast<int>(Code::kInvalidArgument) &&
             header.code <= static_cast<int>(Code::kInternal);
    case FrameKind::kFailure:
      return header.bytes <= kMaxCauseBytes;
    case FrameKind::kWaited:
      return header.bytes <= kMaxMessageBytes;
  }
  return false;
}

std::string Printable(std::string text, size_t most) {
  text.resize(std::min(text.size(), most));
  MakePrintable(&text);
  return text;
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
    std::string text(body, header.bytes);
    if (frame.kind != FrameKind::kWaited) {
      const size_t end = text.find(kAfterWorker);
      frame.event = static_cast<Event>(header.event);
      if (end != std::string::npos) {
        frame.worker = Printable(text.substr(0, end), kMaxNameBytes);
        text.erase(0, end + 1);
      }
    }
    frame.message = Printable(std::move(text), kMaxMessageBytes);
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
  if (abort || failure) {
    body = Printable(frame.worker, kMaxNameBytes) + kAfterWorker;
    body += frame.message.substr(0, kMaxMessageBytes);
  } else if (!HasStatus(frame.kind)) {
    body = frame.message.substr(0, kMaxMessageBytes);
  } else {
    const StatusBody status{
        frame.status.sequence, frame.status.peer,   frame.status.progress,   frame.sent,
        frame.echoed,          frame.echo_received, frame.status.fingerprint};
    body.assign(reinterpret_cast<const char*>(&status), sizeof(status));
  }
  const int code = abort ? static_cast<int>(frame.code) : failure ? frame.failures : 0;
  const Header header{static_cast<uint8_t>(frame.kind), static_cast<uint8_t>(code),
                      static_cast<uint8_t>(frame.status.active ? 1 : 0),
                      static_cast<uint8_t>(abort || failure ? frame.event : Event::kOther),
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

namespace {

constexpr double kTickSeconds = 0.1;
// If an operation takes longer than this, the rank sends its status more often (in a small group,
// at every tick), so that the ranks soon notice stalls and mismatches.
constexpr double kSlowSeconds = 0.1;
// The minimum interval between two status frames of a rank.
constexpr double kBetweenSeconds = kTickSeconds / 2;
// In a large group, each rank receives status frames from many ranks. To limit the cost, each rank
// then sends its status less often, and reads the frames of the other ranks in batches.
constexpr double kSlowStatusSecondsPerRank = 0.0005;
constexpr double kStatusSecondsPerRank = 0.005;
constexpr int kRanksPerBatchMillisecond = 20;
constexpr size_t kMaxWaiting = 1 << 20;
constexpr int kMaxReads = 64;

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

std::string Rounded(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), seconds < 10 ? "%.1f s" : "%.0f s", seconds);
  return text;
}

bool IsMessage(const Status& status) {
  return status.fingerprint.kind == Kind::kSend || status.fingerprint.kind == Kind::kReceive;
}

}  // namespace

struct Watch::Peer {
  std::unique_ptr<Stream> stream;
  FrameReader reader;
  std::string waiting;  // bytes that have not been sent yet
  Clock::time_point heard = Clock::now();
  // Whether a warning about this peer's silence has been printed.
  bool silent = false;
  // The value of `heard` when this warning was printed.
  Clock::time_point heard_last;
  Status status;
  bool left = false;    // whether the peer has sent its farewell
  bool parted = false;  // whether this rank will send nothing more to the peer
  // Whether there may be bytes to read that `poll` does not report, for example in TLS's buffers.
  bool unread = false;
  uint8_t failures = 0;  // the number of the peer's failed steps
  // The last failure that the peer has reported.
  Error failure{Code::kUnavailable, ""};
  // The number of the last collective that the peer had joined when it reported the failure.
  uint64_t failed_after = 0;
  Clock::time_point ended_at;  // when the peer left or reported a failure
  // Whether the peer counts as lost. This rank then sends it the reason, and reads nothing more.
  bool lost = false;
  bool gone = false;      // whether the connection has ended
  int64_t told_at = 0;    // when the peer sent its last status, on the peer's clock
  int64_t told_came = 0;  // when this status arrived, on this rank's clock
  ClockOffset clock;
  OneWayDelay delay;
};

Watch::Watch(Settings settings, Streams streams, Callbacks callbacks)
    : settings_(std::move(settings)),
      callbacks_(std::move(callbacks)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (wake_ < 0) {
    throw Error(Code::kInternal, std::string("There is no descriptor left (") +
                                     std::strerror(errno) + "). Raise the limit of open files.");
  }
  for (auto& stream : streams) {
    peers_.push_back(std::make_unique<Peer>());
    peers_.back()->stream = std::move(stream);
  }
}

Watch::~Watch() {
  Stop();
  close(wake_);
}

double Watch::SlowStatusSeconds(size_t ranks) {
  return std::max(kBetweenSeconds, static_cast<double>(ranks) * kSlowStatusSecondsPerRank);
}

void Watch::Start() {
  if (peers_.size() > 1) {
    thread_ = std::thread([this] { Loop(); });
  }
}

void Watch::Tell(const std::vector<Frame>& frames) {
  {
    const std::lock_guard<std::mutex> lock(telling_mutex_);
    for (const Frame& frame : frames) told_ += Encode(frame);
  }
  WakeUp();
}

void Watch::Stop() {
  stopping_ = true;
  WakeUp();
  if (thread_.joinable()) thread_.join();
  for (const auto& peer : peers_) { peer->stream = nullptr; }
}

void Watch::WakeUp() {
  const uint64_t one = 1;
  // The write fails only if the eventfd is full. The thread then wakes up anyway.
  if (write(wake_, &one, sizeof(one)) < 0) return;
}

void Watch::Loop() {
  pthread_setname_np(pthread_self(), "tfdist-watch");
  Clock::time_point last = Clock::now(), beat = last - std::chrono::hours(1);
  const double patience =
      std::min(settings_.silence_warning_seconds, settings_.silence_timeout_seconds);
  const double ranks_of_group = static_cast<double>(peers_.size());
  const double interval =
      std::min(std::max(std::min(1.0, patience / 5), ranks_of_group * kStatusSecondsPerRank),
               patience / 2.5);
  const double slow_interval = std::min(interval, SlowStatusSeconds(peers_.size()));
  const double tick = std::min(kTickSeconds, interval);
  const int batch_ms = std::min(static_cast<int>(1000 * tick),
                                static_cast<int>(peers_.size()) / kRanksPerBatchMillisecond);
  // At the end of the handshake, TLS may already have read the first frames. `poll` does not report
  // these bytes, so they are read before the first call of `poll`.
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    if (peers_[rank]->stream) Read(static_cast<int>(rank));
  }
  for (;;) {
    const bool stopping = stopping_;
    std::vector<pollfd> polled{{wake_, POLLIN, 0}};
    std::vector<int> ranks{-1};
    bool unread = false;
    for (size_t rank = 0; rank < peers_.size(); ++rank) {
      const Peer& peer = *peers_[rank];
      if (!peer.stream || peer.gone || peer.lost) continue;
      unread = unread || peer.unread;
      const int events = POLLIN | (peer.waiting.empty() ? 0 : POLLOUT);
      polled.push_back({peer.stream->descriptor(), static_cast<short>(events), 0});
      ranks.push_back(static_cast<int>(rank));
    }
    if (!stopping) {
      poll(polled.data(), polled.size(), unread ? 0 : static_cast<int>(1000 * tick));
      if (batch_ms > 0 && !polled[0].revents) {
        poll(polled.data(), 1, batch_ms);
        poll(polled.data(), polled.size(), 0);
      }
    }
    const auto now = Clock::now();
    // If this process was suspended, it could not read the frames of its peers. The silence of the
    // peers during this time does not count.
    if (Seconds(now - last) > patience / 2) {
      for (const auto& peer : peers_) SetHeard(*peer, now);
    }
    last = now;
    if (polled[0].revents) {
      uint64_t count;
      if (read(wake_, &count, sizeof(count)) < 0) continue;
    }
    for (size_t i = 1; i < polled.size(); ++i) {
      if (polled[i].revents & POLLOUT) Send(*peers_[static_cast<size_t>(ranks[i])], "");
      if (polled[i].revents & ~POLLOUT || peers_[static_cast<size_t>(ranks[i])]->unread) {
        Read(ranks[i]);
      }
    }
    callbacks_.tick();
    // This rank's status must be read before the queued frames are sent. If it were read afterward,
    // it could contain an operation that began after a failure, while the frame about the failure
    // has not been sent yet. Peers must learn of the failure first.
    const Doing doing = callbacks_.doing();
    {
      const std::lock_guard<std::mutex> lock(telling_mutex_);
      for (const auto& peer : peers_) Send(*peer, told_);
      told_.clear();
    }
    const double waited = doing.status.active ? Seconds(now - doing.since) : 0;
    const double pause = waited > kSlowSeconds ? slow_interval : interval;
    if (stopping || Seconds(now - beat) > pause) {
      beat = now;
      Frame frame;
      frame.kind = stopping ? FrameKind::kFarewell : FrameKind::kStatus;
      frame.status = doing.status;
      SendStatus(frame);
    }
    if (stopping) return Part();
    CheckSilence(now);
    if (waited > kSlowSeconds) {
      CheckOrder(doing, now);
      CheckStall(doing, now);
    }
  }
}

// Waits until the other ranks have received the farewells. If a connection were closed immediately,
// unsent bytes would be lost. Bytes that this rank has not read would also be a problem, because
// the kernel would then reset the connection.
void Watch::Part() {
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(
                         std::chrono::duration<double>(settings_.parting_seconds));
  for (;;) {
    std::vector<pollfd> polled;
    for (const auto& peer : peers_) {
      if (!peer->stream || peer->gone || peer->lost) continue;
      Send(*peer, "");
      if (peer->waiting.empty() && !peer->parted) {
        shutdown(peer->stream->descriptor(), SHUT_WR);
        peer->parted = true;
      }
      Drain(*peer);
      const int events = POLLIN | (peer->waiting.empty() ? 0 : POLLOUT);
      if (peer->gone) continue;
      polled.push_back({peer->stream->descriptor(), static_cast<short>(events), 0});
    }
    const double left = Seconds(deadline - Clock::now());
    if (polled.empty() || left <= 0) return;
    poll(polled.data(), polled.size(), static_cast<int>(1000 * left) + 1);
  }
}

// Reads and discards the bytes that a peer has sent, because they are no longer needed.
void Watch::Drain(Peer& peer) {
  char bytes[4096];
  for (int reads = 0; reads < kMaxReads; ++reads) {
    const ssize_t got = peer.stream->Read(bytes, sizeof(bytes));
    if (got > 0) continue;
    peer.gone = got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
    return;
  }
}

void Watch::Read(int rank) {
  Peer& peer = *peers_[static_cast<size_t>(rank)];
  char bytes[4096];
  peer.unread = false;
  // The number of reads is limited, so that a busy peer cannot starve the other peers.
  for (int reads = 0; reads < kMaxReads && !peer.gone; ++reads) {
    const ssize_t got = peer.stream->Read(bytes, sizeof(bytes));
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
    if (got <= 0) {
      peer.gone = true;
      if (peer.left) {
        // The other rank waits in `Part` until this rank closes the connection as well.
        shutdown(peer.stream->descriptor(), SHUT_WR);
      } else {
        // ECONNRESET usually means that the process has ended: the kernel resets a connection if a
        // process exits before it has read all bytes.
        Lose(rank, Event::kLost,
             got == 0 || errno == ECONNRESET
                 ? "its process has ended"
                 : std::string("the connection broke (") + std::strerror(errno) + ")");
      }
      return;
    }
    SetHeard(peer, Clock::now());
    const auto handle = [this, rank](const Frame& frame) { Handle(rank, frame); };
    if (!peer.reader.Feed(bytes, static_cast<size_t>(got), handle)) {
      Lose(rank, Event::kLost, "it sent a malformed frame");
      return;
    }
  }
  peer.unread = !peer.gone;
}

void Watch::Handle(int rank, const Frame& frame) {
  Peer& peer = *peers_[static_cast<size_t>(rank)];
  switch (frame.kind) {
    case FrameKind::kStatus: {
      if (frame.status.progress != peer.status.progress) callbacks_.progress();
      const std::lock_guard<std::mutex> lock(known_mutex_);
      peer.status = frame.status;
      peer.told_at = frame.sent;
      peer.told_came = Nanoseconds(peer.heard);
      peer.clock.Add({frame.echoed, frame.echo_received, frame.sent, peer.told_came});
      peer.delay.Add(frame.sent, peer.told_came, peer.clock);
      break;
    }
    case FrameKind::kWaited:
      callbacks_.waited_for(frame.message);
      break;
    case FrameKind::kAbort:
      callbacks_.give_up(Error(frame.code, frame.message, frame.event, frame.worker));
      break;
    case FrameKind::kFarewell: {
      const std::lock_guard<std::mutex> lock(known_mutex_);
      peer.status = frame.status;
      peer.status.active = false;
      peer.left = true;
      peer.ended_at = Clock::now();
      break;
    }
    case FrameKind::kFailure:
      peer.failures = frame.failures;
      peer.failure = Error(Code::kUnavailable, frame.message, frame.event, frame.worker);
      peer.failed_after = peer.status.sequence;
      peer.ended_at = Clock::now();
      break;
  }
}

void Watch::Send(Peer& peer, const std::string& bytes) {
  if (!peer.stream || peer.gone) return;
  // Frames beyond the limit are dropped. A peer that does not read its frames has probably stopped
  // sending frames as well, so it will soon count as lost.
  if (peer.waiting.size() + bytes.size() <= kMaxWaiting) peer.waiting += bytes;
  while (!peer.waiting.empty()) {
    const ssize_t sent = peer.stream->Write(peer.waiting.data(), peer.waiting.size());
    if (sent <= 0) return;
    peer.waiting.erase(0, static_cast<size_t>(sent));
  }
}

void Watch::SendStatus(Frame frame) {
  for (const auto& peer : peers_) {
    if (!peer->stream || peer->gone) continue;
    frame.sent = Nanoseconds();
    frame.echoed = peer->told_at;
    frame.echo_received = peer->told_came;
    Send(*peer, Encode(frame));
  }
}

void Watch::SetHeard(Peer& peer, Clock::time_point when) {
  const std::lock_guard<std::mutex> lock(known_mutex_);
  peer.heard = when;
}

std::vector<Watch::Known> Watch::Others() {
  const std::lock_guard<std::mutex> lock(known_mutex_);
  std::vector<Known> others;
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    if (static_cast<int>(rank) == settings_.rank) continue;
    const Peer& peer = *peers_[rank];
    others.push_back({static_cast<int>(rank), peer.status, Nanoseconds(peer.heard), peer.left,
                      peer.lost, peer.clock, peer.delay});
  }
  return others;
}

// Declares a rank lost, and aborts the group. This rank reads nothing more from the lost rank, but
// still sends it the reason for the abort.
void Watch::Lose(int rank, Event event, const std::string& why) {
  const std::string& name = settings_.names[static_cast<size_t>(rank)];
  {
    const std::lock_guard<std::mutex> lock(known_mutex_);
    peers_[static_cast<size_t>(rank)]->lost = true;
  }
  callbacks_.give_up(Error(Code::kUnavailable, name + " is lost: " + why + ".", event, name));
}

void Watch::CheckSilence(Clock::time_point now) {
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    Peer& peer = *peers_[rank];
    if (!peer.stream || peer.gone || peer.lost || peer.left) continue;
    const double silent = Seconds(now - peer.heard);
    const std::string& name = settings_.names[rank];
    if (silent > settings_.silence_timeout_seconds) {
      Lose(static_cast<int>(rank), Event::kSilent,
           "no sign of life for " + Rounded(settings_.silence_timeout_seconds));
    } else if (peer.silent && peer.heard > peer.heard_last) {
      peer.silent = false;
      callbacks_.warn(name + " responds again, after " +
                      Rounded(Seconds(peer.heard - peer.heard_last)) + ".");
    } else if (!peer.silent && silent > settings_.silence_warning_seconds) {
      peer.silent = true;
      peer.heard_last = peer.heard;
      callbacks_.warn("No sign of life from " + name + " for " + Rounded(silent) +
                      ", though its connection is open. It counts as lost after " +
                      Rounded(settings_.silence_timeout_seconds) + ".");
    }
  }
}

void Watch::CheckOrder(const Doing& doing, Clock::time_point now) {
  const Status& mine = doing.status;
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    const Peer& peer = *peers_[rank];
    if (!peer.stream) continue;
    const std::string& name = settings_.names[rank];
    const bool together = !IsMessage(mine) || mine.peer == static_cast<int>(rank);
    const bool failed = FailedMore(peer.failures, mine.fingerprint.failures);
    const uint64_t last = failed ? peer.failed_after : peer.status.sequence;
    // The peer has left or failed, so this rank's operation fails if it needs the peer. A
    // collective fails immediately if the peer has not joined it. A message fails only after some
    // time, because the peer may have sent it before, and the data may still be in transit.
    if ((failed || peer.left) && together &&
        (IsMessage(mine) ? Seconds(now - peer.ended_at) > settings_.silence_warning_seconds
                         : last < mine.sequence)) {
      callbacks_.give_up(failed
                             ? peer.failure
                             : Error(Code::kUnavailable,
                                     name + " has left the group: its program has ended, or has "
                                            "closed it. Run the same number of steps on all ranks.",
                                     Event::kLeft, name));
      return;
    }
    // If this rank's step has failed, the other rank may not count this failure yet. The
    // fingerprints of the two ranks may then differ for a good reason. The other rank will fail
    // with this rank's report of the failure.
    if (FailedMore(mine.fingerprint.failures, peer.status.fingerprint.failures)) continue;
    Fingerprint joined;
    const bool both = peer.status.active && !IsMessage(peer.status) &&
                      callbacks_.joined(peer.status.sequence, &joined);
    // Whether the other rank waits in a send to this rank or in a receive from this rank, and
    // therefore cannot join this rank's collective. If this rank has already handled the message,
    // this is not a problem: the other rank's status is only outdated.
    const bool message_to_me =
        peer.status.active && IsMessage(peer.status) && peer.status.peer == settings_.rank &&
        !IsMessage(mine) && peer.status.sequence < mine.sequence &&
        !callbacks_.has_handled(static_cast<int>(rank), peer.status.fingerprint);
    if (message_to_me) joined = mine.fingerprint;
    if (message_to_me || (both && !Agree(joined, peer.status.fingerprint))) {
      callbacks_.give_up(Disagreement(settings_.names[static_cast<size_t>(settings_.rank)], joined,
                                      name, peer.status.fingerprint));
      return;
    }
  }
}

void Watch::CheckStall(const Doing& doing, Clock::time_point now) {
  const auto since = std::max(doing.since, doing.progress);
  const double waited = Seconds(now - since);
  if (since != warned_for_) {
    warned_for_ = since;
    next_warning_ = settings_.stall_seconds;
  }
  if (waited < std::min(next_warning_, settings_.timeout_seconds)) return;
  const std::vector<int> missing = Missing(doing);
  const std::string what = Describe(doing.status.fingerprint) + " has waited " + Rounded(waited) +
                           (missing.empty() ? std::string(" though all ranks have joined it")
                                            : " for " + Names(missing));
  if (waited >= settings_.timeout_seconds) {
    callbacks_.give_up(Error(Code::kUnavailable, what + ", the longest that was allowed."));
  } else {
    callbacks_.warn(what + ".");
    callbacks_.stalled(what + ".");
    Frame frame;
    frame.kind = FrameKind::kWaited;
    frame.message = settings_.names[static_cast<size_t>(settings_.rank)] + ": " + what + ".";
    const std::string bytes = Encode(frame);
    for (const int rank : missing) Send(*peers_[static_cast<size_t>(rank)], bytes);
    next_warning_ = 2 * waited;
  }
}

std::vector<int> Watch::Missing(const Doing& doing) const {
  std::vector<int> missing;
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    const Peer& peer = *peers_[rank];
    if (!peer.stream) continue;
    const bool joined = IsMessage(doing.status) ? doing.status.peer != static_cast<int>(rank)
                                                : peer.status.sequence >= doing.status.sequence;
    if (!joined) missing.push_back(static_cast<int>(rank));
  }
  return missing;
}

std::string Watch::Names(const std::vector<int>& ranks) const {
  constexpr size_t kMax = 8;
  std::string text;
  for (size_t i = 0; i < std::min(ranks.size(), kMax); ++i) {
    text += (i ? ", " : "") + settings_.names[static_cast<size_t>(ranks[i])];
  }
  if (ranks.size() > kMax) text += " and " + std::to_string(ranks.size() - kMax) + " more";
  return text;
}

}  // namespace tfdist
