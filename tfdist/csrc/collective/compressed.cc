#include "collective/compressed.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "transport/exchange.h"

namespace tfdist {
namespace {

constexpr size_t kFloat = sizeof(float);
constexpr size_t kChunkValues = 64 << 10;

// Of the sums. A majority of signs may be a tie, which has no sign.
Codec ForSums(Codec codec) {
  if (codec.form == Form::kSigns && codec.unit) {
    codec.form = Form::kLevels;
    codec.bits = 2;
    codec.stochastic = codec.euclidean = false;
    codec.clip = 0;
  }
  return codec;
}

// Adds how long it lives.
class Timed {
 public:
  explicit Timed(int64_t* total) : total_(total), begin_(Nanoseconds()) {}
  ~Timed() { *total_ += Nanoseconds() - begin_; }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  int64_t* const total_;
  const int64_t begin_;
};

class Compressed {
 public:
  Compressed(Fabric& fabric, const Fingerprint& joined, const Members& members,
             const Transfer& transfer, const Compression& compression, size_t error_begin)
      : fabric_(fabric),
        exchange_(fabric, joined),
        members_(members),
        t_(transfer),
        compression_(compression),
        codec_(compression.codec),
        sums_codec_(ForSums(codec_)),
        error_begin_(error_begin),
        size_(static_cast<int>(members.ranks.size())),
        chunk_(kChunkValues / codec_.block * codec_.block),
        received_(members.ranks.size(), 0) {}

  void operator()() {
    LayOut();
    ForOthers([this](int j) { SendValues(j); });
    ForOthers([this](int j) { ReceiveValues(j); });
    ForOthers([this](int j) { ReceiveSums(j); });
    exchange_.Run();
    fabric_.recorder.Coded(coding_);
  }

 private:
  // Values [begin, begin + count) of a part, and where they lie when encoded.
  struct Chunk {
    size_t begin;
    size_t count;
    uint8_t* encoded;
    size_t bytes;
  };

  template <typename Use>
  void ForOthers(Use use) {
    for (int step = 1; step < size_; ++step) use((members_.me + step) % size_);
  }
  int Rank(int j) const { return members_.ranks[static_cast<size_t>(j)]; }
  size_t Count(int j) const { return t_.part_bytes[static_cast<size_t>(j)] / kFloat; }
  size_t Own() const { return Count(members_.me); }

  Chunk ChunkAt(const Codec& codec, uint8_t* encoded, size_t part_count, size_t index) const {
    const size_t begin = index * chunk_;
    const size_t count = std::min(chunk_, part_count - begin);
    return {begin, count, encoded + index * EncodedBytes(codec, chunk_),
            EncodedBytes(codec, count)};
  }
  size_t Chunks(size_t count) const { return (count + chunk_ - 1) / chunk_; }

  // The memory: encoded values for everyone, everyone's for this rank, encoded sums of every part,
  // and two chunks of floats.
  void LayOut() {
    size_t bytes = 2 * chunk_ * kFloat;
    for (int j = 0; j < size_; ++j) {
      bytes += EncodedBytes(codec_, Count(j)) + EncodedBytes(codec_, Own()) +
               EncodedBytes(sums_codec_, Count(j));
    }
    char* memory = fabric_.link_scratch.Take(bytes);
    values_ = reinterpret_cast<float*>(memory);
    errors_ = values_ + chunk_;
    auto* next = reinterpret_cast<uint8_t*>(errors_ + chunk_);
    const auto take = [&next](const Codec& codec, size_t count) {
      return std::exchange(next, next + EncodedBytes(codec, count));
    };
    for (int j = 0; j < size_; ++j) {
      sent_.push_back(take(codec_, Count(j)));
      arrived_.push_back(take(codec_, Own()));
      sums_.push_back(take(sums_codec_, Count(j)));
    }
  }

  void SendValues(int j) {
    exchange_.Send(Rank(j), nullptr, 0);
    for (size_t c = 0; c < Chunks(Count(j)); ++c) {
      const Chunk chunk = ChunkAt(codec_, sent_[static_cast<size_t>(j)], Count(j), c);
      exchange_.Send(Rank(j), chunk.encoded, chunk.bytes, [this, j, chunk] {
        const Timed timed(&coding_);
        CopyIn(t_.InBegin(j), chunk, values_);
        EncodeChunk(codec_, j, chunk, 0);
      });
    }
  }

  void ReceiveValues(int j) {
    exchange_.Receive(Rank(j), nullptr, 0);
    for (size_t c = 0; c < Chunks(Own()); ++c) {
      const Chunk chunk = ChunkAt(codec_, arrived_[static_cast<size_t>(j)], Own(), c);
      exchange_.Receive(Rank(j), chunk.encoded, chunk.bytes, [this, j, chunk](size_t received) {
        if (received < chunk.bytes) return;
        ++received_[static_cast<size_t>(j)];
        SumReady();
      });
    }
  }

  void ReceiveSums(int j) {
    for (size_t c = 0; c < Chunks(Count(j)); ++c) {
      const Chunk chunk = ChunkAt(sums_codec_, sums_[static_cast<size_t>(j)], Count(j), c);
      exchange_.Receive(Rank(j), chunk.encoded, chunk.bytes, [this, j, chunk](size_t received) {
        if (received < chunk.bytes) return;
        const Timed timed(&coding_);
        DecodeSums(j, chunk);
      });
    }
  }

  bool Ready() {
    bool ready = summed_ < Chunks(Own());
    ForOthers([&](int j) { ready = ready && received_[static_cast<size_t>(j)] > summed_; });
    return ready;
  }

  void SumReady() {
    for (; Ready(); ++summed_) {
      const auto me = static_cast<size_t>(members_.me);
      const Chunk sum = ChunkAt(sums_codec_, sums_[me], Own(), summed_);
      const Timed timed(&coding_);
      AddUp(sum);
      EncodeChunk(sums_codec_, members_.me, sum, 1);
      DecodeSums(members_.me, sum);
      ForOthers([&](int j) { exchange_.Send(Rank(j), sum.encoded, sum.bytes); });
    }
  }

  // Everyone's values of a chunk of the own part, in the members' order.
  void AddUp(const Chunk& sum) {
    std::fill_n(values_, sum.count, 0.0f);
    for (int j = 0; j < size_; ++j) {
      const Chunk chunk = ChunkAt(codec_, arrived_[static_cast<size_t>(j)], Own(), summed_);
      if (j != members_.me) {
        Decode(codec_, {chunk.encoded, sum.count, values_, true});
        continue;
      }
      CopyIn(t_.InBegin(j), sum, errors_);
      if (Votes()) {
        Encode(codec_, {errors_, nullptr, sum.count, chunk.encoded, 0});
        Decode(codec_, {chunk.encoded, sum.count, errors_, false});
      }
      for (size_t i = 0; i < sum.count; ++i) values_[i] += errors_[i];
    }
    if (!Votes()) return;
    for (size_t i = 0; i < sum.count; ++i) {
      // Not a number stays.
      values_[i] = values_[i] > 0 ? 1.0f : values_[i] < 0 ? -1.0f : values_[i];
    }
  }

  bool Votes() const { return codec_.form == Form::kSigns && codec_.unit; }

  // Encodes `values_`. Args: j: whose part it is; stage: 0 for values, 1 for sums.
  void EncodeChunk(const Codec& codec, int j, const Chunk& chunk, uint32_t stage) {
    const size_t position = t_.Begin(j) / kFloat + chunk.begin;
    const uint32_t seed = compression_.seed + static_cast<uint32_t>(Rank(members_.me)) * 0x9e3779b9u +
                          static_cast<uint32_t>(position) * 0x85ebca6bu + stage;
    const Pieces& error = compression_.error;
    const size_t error_at = error_begin_ + position * kFloat, bytes = chunk.count * kFloat;
    const bool feeds_back = error.bytes() > 0;
    if (feeds_back) {
      char* to = reinterpret_cast<char*>(errors_);
      error.ForEach(error_at, bytes, [&to](const char* from, size_t some) {
        std::memcpy(to, from, some);
        to += some;
      });
    }
    Encode(codec, {values_, feeds_back ? errors_ : nullptr, chunk.count, chunk.encoded, seed});
    if (feeds_back) CopyOut(errors_, error, error_at, bytes);
  }

  void DecodeSums(int j, const Chunk& chunk) {
    Decode(sums_codec_, {chunk.encoded, chunk.count, values_, false});
    CopyOut(values_, t_.out, t_.OutBegin(j) + chunk.begin * kFloat, chunk.count * kFloat);
  }

  void CopyIn(size_t part_begin, const Chunk& chunk, float* values) {
    char* to = reinterpret_cast<char*>(values);
    t_.in.ForEach(part_begin + chunk.begin * kFloat, chunk.count * kFloat,
                  [&to](const char* from, size_t bytes) {
                    std::memcpy(to, from, bytes);
                    to += bytes;
                  });
  }

  static void CopyOut(const float* values, const Pieces& pieces, size_t begin, size_t bytes) {
    const char* from = reinterpret_cast<const char*>(values);
    pieces.ForEach(begin, bytes, [&from](char* to, size_t some) {
      std::memcpy(to, from, some);
      from += some;
    });
  }

  Fabric& fabric_;
  Exchange exchange_;
  const Members& members_;
  const Transfer& t_;
  const Compression& compression_;
  const Codec codec_;
  const Codec sums_codec_;
  const size_t error_begin_;
  const int size_;
  const size_t chunk_;  // values, whole blocks
  float* values_ = nullptr;  // of the chunk in work
  float* errors_ = nullptr;
  std::vector<uint8_t*> sent_;     // for each member its encoded values
  std::vector<uint8_t*> arrived_;  // from each member, of the own part
  std::vector<uint8_t*> sums_;     // of each part
  std::vector<size_t> received_;   // for each member, chunks of the own part that have come
  size_t summed_ = 0;              // chunks of the own part
  int64_t coding_ = 0;             // nanoseconds spent on encoding, decoding and adding up
};

}  // namespace

void RunCompressed(Fabric& fabric, const Fingerprint& joined, const Members& members,
                   const Transfer& transfer, const Compression& compression, size_t error_begin) {
  Compressed(fabric, joined, members, transfer, compression, error_begin)();
}

}  // namespace tfdist
