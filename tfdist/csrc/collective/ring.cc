#include "collective/algorithms.h"

#include <algorithm>

#include "reduce/reduce.h"

namespace tfdist {
namespace {

constexpr size_t kChunk = 256 << 10;

class AroundRing {
 public:
  AroundRing(Fabric& fabric, const Fingerprint& joined, const Members& members,
             const Transfer& transfer)
      : fabric_(fabric),
        exchange_(fabric, joined),
        t_(transfer),
        me_(members.me),
        size_(static_cast<int>(members.ranks.size())),
        next_(members.ranks[static_cast<size_t>((me_ + 1) % size_)]),
        previous_(members.ranks[static_cast<size_t>((me_ + size_ - 1) % size_)]) {}

  void operator()() {
    exchange_.Send(next_, nullptr, 0);
    exchange_.Receive(previous_, nullptr, 0);
    sums_ = fabric_.link_scratch.Take(t_.Begin(size_));
    Send(t_.in, PartBefore(1), 0, PartBytes(PartBefore(1)));
    for (int step = 0; step + 1 < size_; ++step) ReceiveSums(step);
    for (int step = 0; step + 1 < size_; ++step) ReceiveResults(step);
    exchange_.Run();
  }

 private:
  int PartBefore(int distance) const { return (me_ - distance % size_ + size_) % size_; }
  size_t PartBytes(int j) const { return t_.part_bytes[static_cast<size_t>(j)]; }

  template <typename Source>
  void Send(const Source& source, int part, size_t begin, size_t bytes) {
    source.ForEach(t_.Begin(part) + begin, bytes,
                   [this](const char* data, size_t some) { exchange_.Send(next_, data, some); });
  }

  // Receives the partial sums of one part from the previous member, adds this member's values, and
  // sends the sums to the next member. In the last step, the received part is the one that this
  // member owns. Its sums are then complete, and are sent as the result.
  void ReceiveSums(int step) {
    const int part = PartBefore(step + 2);
    const bool complete = part == me_;
    for (size_t begin = 0; begin < PartBytes(part); begin += kChunk) {
      const size_t bytes = std::min(kChunk, PartBytes(part) - begin);
      char* sums = sums_ + t_.Begin(part) + begin;
      exchange_.Receive(previous_, sums, bytes,
                        [this, part, complete, begin, bytes, sums](size_t received) {
                          if (received < bytes) return;
                          Add(part, begin, bytes, sums, complete);
                          if (complete) {
                            Send(t_.out, part, begin, bytes);
                          } else {
                            exchange_.Send(next_, sums, bytes);
                          }
                        });
    }
  }

  void Add(int part, size_t begin, size_t bytes, char* sums, bool complete) {
    const size_t at = t_.Begin(part) + begin, element = SizeOf(t_.type);
    for (size_t done = 0; done < bytes;) {
      const auto in = t_.in.At(at + done);
      const auto out = t_.out.At(at + done);
      const size_t some = std::min({in.bytes, out.bytes, bytes - done});
      const void* inputs[] = {sums + done, in.data};
      Reduce({t_.type, t_.op, complete ? t_.divisor : 1.0, inputs, 2, some / element,
              complete ? out.data : sums + done});
      done += some;
    }
  }

  void ReceiveResults(int step) {
    const int part = PartBefore(step + 1);
    const bool pass_on = step + 2 < size_;
    for (size_t begin = 0; begin < PartBytes(part); begin += kChunk) {
      const size_t length = std::min(kChunk, PartBytes(part) - begin);
      t_.out.ForEach(t_.Begin(part) + begin, length, [&](char* data, size_t bytes) {
        exchange_.Receive(previous_, data, bytes, [this, pass_on, data, bytes](size_t received) {
          if (pass_on && received == bytes) exchange_.Send(next_, data, bytes);
        });
      });
    }
  }

  Fabric& fabric_;
  Exchange exchange_;
  const Transfer& t_;
  const int me_;
  const int size_;
  const int next_;
  const int previous_;
  char* sums_ = nullptr;  // the partial sums of each part, at the offset of the part
};

}  // namespace

void RunRing(Fabric& fabric, const Fingerprint& joined, const Members& members,
             const Transfer& transfer) {
  if (members.ranks.size() == 1) {
    RunTwoShot(fabric, joined, members, transfer);
  } else {
    AroundRing(fabric, joined, members, transfer)();
  }
}

}  // namespace tfdist
