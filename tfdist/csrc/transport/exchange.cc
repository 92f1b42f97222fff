#include "transport/exchange.h"

#include <poll.h>

#include <algorithm>
#include <utility>

#include "error.h"

namespace tfdist {
namespace {

// Other ranks of this host signal their progress through a futex, which does not wake poll(). If
// transfers over sockets and transfers within the host are both pending, poll() must therefore
// return soon.
constexpr int kMixedPollMilliseconds = 1;
constexpr int kPollMilliseconds = 20;
constexpr int kSpins = 200;

}  // namespace

Exchange::Exchange(Fabric& fabric, const Fingerprint& joined)
    : fabric_(fabric), joined_(joined), streams_(static_cast<size_t>(fabric.topology.size)) {}

void Exchange::Send(int rank, const void* data, size_t bytes, Fill fill) {
  Stream& stream = At(rank);
  if (!stream.opened_out) {
    stream.opened_out = true;
    stream.out.push_back({reinterpret_cast<const char*>(&joined_), sizeof(joined_), {}});
  }
  if (bytes > 0) { stream.out.push_back({static_cast<const char*>(data), bytes, std::move(fill)}); }
}

void Exchange::Receive(int rank, void* data, size_t bytes, OnBytes on_bytes) {
  Stream& stream = At(rank);
  if (!stream.opened_in) {
    stream.opened_in = true;
    const auto compare = [this, rank, &stream](size_t received) {
      if (received == sizeof(Fingerprint)) Compare(rank, stream.theirs);
    };
    stream.in.push_back({reinterpret_cast<char*>(&stream.theirs), sizeof(Fingerprint), 0, compare});
  }
  if (bytes > 0) stream.in.push_back({static_cast<char*>(data), bytes, 0, std::move(on_bytes)});
}

void Exchange::Run() {
  fabric_.guard.NoteProgress();
  int idle = 0;
  while (!Done()) {
    if (Advance()) {
      idle = 0;
      continue;
    }
    waited_ = true;
    if (++idle > kSpins) {
      fabric_.guard.Check();
      Wait();
    } else {
      Pause();
    }
  }
}

bool Exchange::Advance() {
  bool advanced = false;
  for (int rank = 0; rank < fabric_.topology.size; ++rank) {
    Stream& stream = At(rank);
    if (!stream.out.empty()) advanced |= AdvanceOut(rank, stream);
    if (!stream.in.empty()) advanced |= AdvanceIn(rank, stream);
  }
  if (advanced) fabric_.guard.NoteProgress();
  return advanced;
}

bool Exchange::AdvanceOut(int rank, Stream& stream) {
  Outgoing& next = stream.out.front();
  if (next.fill) std::exchange(next.fill, {})();
  const size_t taken = fabric_.link(rank).Write(next.data, next.bytes);
  next.data += taken;
  next.bytes -= taken;
  if (next.bytes == 0) stream.out.pop_front();
  return taken > 0;
}

bool Exchange::AdvanceIn(int rank, Stream& stream) {
  Incoming& next = stream.in.front();
  const size_t got = fabric_.link(rank).Read(next.data + next.received, next.bytes - next.received);
  if (got == 0) return false;
  next.received += got;
  const size_t received = next.received;
  const bool whole = received == next.bytes;
  // The callback may add to the queues, so it is taken out of the queue before it is called.
  const OnBytes on_bytes = whole ? std::move(next.on_bytes) : next.on_bytes;
  if (whole) stream.in.pop_front();
  if (on_bytes) on_bytes(received);
  return true;
}

void Exchange::Compare(int rank, const Fingerprint& theirs) {
  fabric_.recorder.Arrived(rank, waited_);
  if (Agree(joined_, theirs)) return;
  const auto& names = fabric_.topology.names;
  throw Disagreement(names[static_cast<size_t>(fabric_.topology.rank)], joined_,
                     names[static_cast<size_t>(rank)], theirs);
}

bool Exchange::Done() const {
  return std::all_of(streams_.begin(), streams_.end(),
                     [](const Stream& stream) { return stream.out.empty() && stream.in.empty(); });
}

void Exchange::Wait() {
  std::vector<pollfd> polled;
  bool signals = false;
  for (int rank = 0; rank < fabric_.topology.size; ++rank) {
    const Stream& stream = At(rank);
    if (stream.out.empty() && stream.in.empty()) continue;
    const int descriptor = fabric_.link(rank).descriptor();
    if (descriptor < 0) {
      signals = true;
      continue;
    }
    const int events = (stream.out.empty() ? 0 : POLLOUT) | (stream.in.empty() ? 0 : POLLIN);
    polled.push_back({descriptor, static_cast<short>(events), 0});
  }
  if (!polled.empty()) {
    poll(polled.data(), polled.size(), signals ? kMixedPollMilliseconds : kPollMilliseconds);
    return;
  }
  Host& host = *fabric_.host;
  bool advanced = false;
  WaitUntil([&] { return advanced = advanced || Advance(); }, host.event(), host.spin_policy(),
            fabric_.guard);
}

}  // namespace tfdist
