#include "collective/algorithms.h"

#include <algorithm>
#include <cstring>

namespace tfdist {
namespace {

constexpr size_t kChunk = 256 << 10;
// The maximum number of chunks from each member in the scratch memory. A chunk from one member
// stays there until the same chunk has arrived from all other members, because it is then reduced.
constexpr size_t kWindow = 8;

class Direct {
 public:
  Direct(Fabric& fabric, const Fingerprint& joined, const Members& members,
         const Transfer& transfer)
      : fabric_(fabric),
        exchange_(fabric, joined),
        members_(members),
        t_(transfer),
        size_(static_cast<int>(members.ranks.size())),
        own_(transfer.part_bytes[static_cast<size_t>(members.me)]),
        chunks_((own_ + kChunk - 1) / kChunk),
        posted_(static_cast<size_t>(size_), 0),
        received_(static_cast<size_t>(size_), 0) {}

  void operator()() {
    if (t_.scatter) {
      room_ = std::min(own_, kWindow * kChunk);
      scratch_ = fabric_.link_scratch.Take(room_ * static_cast<size_t>(size_));
      ForOthers([this](int j) { SendPart(j); });
      ForOthers([this](int j) { Post(j); });
      if (size_ == 1) ReduceReady();
    } else {
      CopyPart(t_, members_.me, 0, own_);
      if (t_.gather) ForOthers([this](int j) { SendOwn(j, 0, own_, t_.in, 0); });
    }
    if (!t_.scatter || chunks_ == 0) {
      ForOthers([this](int j) { ReceivePart(j); });
    }
    exchange_.Run();
  }

 private:
  template <typename Use>
  void ForOthers(Use use) {
    for (int step = 1; step < size_; ++step) use((members_.me + step) % size_);
  }
  int Rank(int j) const { return members_.ranks[static_cast<size_t>(j)]; }
  size_t PartBytes(int j) const { return t_.part_bytes[static_cast<size_t>(j)]; }
  size_t ChunkBytes(size_t chunk) const { return std::min(kChunk, own_ - chunk * kChunk); }
  char* Scratch(int j, size_t chunk) {
    return scratch_ + room_ * static_cast<size_t>(j) + chunk % kWindow * kChunk;
  }

  void SendPart(int j) {
    exchange_.Send(Rank(j), nullptr, 0);
    t_.in.ForEach(t_.InBegin(j), PartBytes(j),
                  [&](const char* data, size_t bytes) { exchange_.Send(Rank(j), data, bytes); });
  }

  template <typename Source>
  void SendOwn(int j, size_t begin, size_t bytes, const Source& source, size_t source_begin) {
    exchange_.Send(Rank(j), nullptr, 0);
    source.ForEach(source_begin + begin, bytes,
                   [&](const char* data, size_t some) { exchange_.Send(Rank(j), data, some); });
  }

  // Posts the receives of the next chunks that member j sends for this member's part, as many as
  // fit in the window. After the last of them, posts the receive of the result of member j's part.
  void Post(int j) {
    exchange_.Receive(Rank(j), nullptr, 0);
    size_t& next = posted_[static_cast<size_t>(j)];
    while (next < chunks_ && next < reduced_ + kWindow) {
      const size_t bytes = ChunkBytes(next);
      exchange_.Receive(Rank(j), Scratch(j, next), bytes, [this, j, bytes](size_t received) {
        if (received < bytes) return;
        ++received_[static_cast<size_t>(j)];
        ReduceReady();
      });
      if (++next == chunks_) ReceivePart(j);
    }
  }

  void ReceivePart(int j) {
    exchange_.Receive(Rank(j), nullptr, 0);
    if (!t_.gather) return;
    t_.out.ForEach(t_.OutBegin(j), PartBytes(j),
                   [&](char* data, size_t bytes) { exchange_.Receive(Rank(j), data, bytes); });
  }

  bool Ready() {
    bool ready = reduced_ < chunks_;
    ForOthers([&](int j) { ready = ready && received_[static_cast<size_t>(j)] > reduced_; });
    return ready;
  }

  void ReduceReady() {
    while (Ready()) {
      const size_t chunk = reduced_, begin = chunk * kChunk, bytes = ChunkBytes(chunk);
      std::vector<const char*> others(static_cast<size_t>(size_), nullptr);
      ForOthers([&](int j) { others[static_cast<size_t>(j)] = Scratch(j, chunk); });
      ReducePart(t_, members_.me, begin, bytes, others);
      ++reduced_;
      if (t_.gather) {
        ForOthers([&](int j) { SendOwn(j, begin, bytes, t_.out, t_.OutBegin(members_.me)); });
      }
    }
    ForOthers([this](int j) { Post(j); });
  }

  Fabric& fabric_;
  Exchange exchange_;
  const Members& members_;
  const Transfer& t_;
  const int size_;
  const size_t own_;     // the size of this member's part in bytes
  const size_t chunks_;  // the number of chunks of this member's part
  size_t room_ = 0;      // the size of the scratch memory for each member, in bytes
  char* scratch_ = nullptr;
  std::vector<size_t> posted_;    // for each member, the number of chunks with a posted receive
  std::vector<size_t> received_;  // for each member, the number of received chunks
  size_t reduced_ = 0;
};

}  // namespace

void RunTwoShot(Fabric& fabric, const Fingerprint& joined, const Members& members,
                const Transfer& transfer) {
  Direct(fabric, joined, members, transfer)();
}

void RunOneShot(Fabric& fabric, const Fingerprint& joined, const Members& members,
                const Transfer& transfer) {
  const size_t size = members.ranks.size(), bytes = transfer.in.bytes();
  const auto me = static_cast<size_t>(members.me);
  char* scratch = fabric.link_scratch.Take(size * bytes);
  Exchange exchange(fabric, joined);
  char* mine = scratch + me * bytes;
  transfer.in.ForEach(0, bytes, [&mine](const char* data, size_t some) {
    std::memcpy(mine, data, some);
    mine += some;
  });
  std::vector<const char*> all(size);
  for (size_t j = 0; j < size; ++j) {
    all[j] = scratch + j * bytes;
    if (j == me) continue;
    exchange.Send(members.ranks[j], scratch + me * bytes, bytes);
    exchange.Receive(members.ranks[j], scratch + j * bytes, bytes);
  }
  exchange.Run();
  // In this algorithm, each rank reduces all values itself. The reduction therefore treats all of
  // the data as this rank's own part.
  Transfer reduction = transfer;
  reduction.part_bytes.assign(size, 0);
  reduction.part_bytes[me] = bytes;
  ReducePart(reduction, members.me, 0, bytes, all);
}

}  // namespace tfdist
