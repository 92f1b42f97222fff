#include "collective/compressed.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "collective/coder.h"
#include "error.h"
#include "transport/exchange.h"

namespace tfdist {
namespace {

// Measures time: the destructor adds the lifetime of this object, in nanoseconds, to `*total`.
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
             const CodedTransfer& transfer, Coder& coder)
      : fabric_(fabric),
        exchange_(fabric, joined),
        members_(members),
        t_(transfer),
        coder_(coder),
        size_(transfer.members()),
        batch_(coder.ChunksAtOnce() * transfer.chunk()),
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
  using Batch = Coder::Batch;

  template <typename Use>
  void ForOthers(Use use) {
    for (int step = 1; step < size_; ++step) use((members_.me + step) % size_);
  }
  int Rank(int j) const { return members_.ranks[static_cast<size_t>(j)]; }
  size_t Own() const { return t_.Count(members_.me); }

  Batch BatchAt(const Codec& codec, uint8_t* encoded, size_t part_count, size_t index) const {
    const size_t begin = index * batch_;
    const size_t count = std::min(batch_, part_count - begin);
    return {begin, count, encoded + index * EncodedBytes(codec, batch_),
            EncodedBytes(codec, count)};
  }
  size_t Batches(size_t count) const { return (count + batch_ - 1) / batch_; }

  // Divides the buffer for encoded values into regions. The first region is for the values that the
  // members send for this rank's part. Two regions follow for each part: the first is for the
  // values that this rank sends for the part, and the second is for the encoded sums of the part.
  void LayOut() {
    const Codec &codec = t_.codec(), &sums_codec = t_.sums_codec();
    arrived_.stride = EncodedBytes(codec, Own());
    const Timed timed(&coding_);
    uint8_t* next = arrived_.encoded = coder_.Begin(t_);
    next += static_cast<size_t>(size_) * arrived_.stride;
    for (int j = 0; j < size_; ++j) {
      sent_.push_back(std::exchange(next, next + EncodedBytes(codec, t_.Count(j))));
      sums_.push_back(std::exchange(next, next + EncodedBytes(sums_codec, t_.Count(j))));
    }
  }

  void SendValues(int j) {
    exchange_.Send(Rank(j), nullptr, 0);
    for (size_t b = 0; b < Batches(t_.Count(j)); ++b) {
      const Batch batch = BatchAt(t_.codec(), sent_[static_cast<size_t>(j)], t_.Count(j), b);
      const Timed timed(&coding_);
      coder_.Foresee(j, batch);
      exchange_.Send(Rank(j), batch.encoded, batch.bytes, [this, j, batch] {
        const Timed timed(&coding_);
        coder_.EncodeBatch(j, batch);
      });
    }
  }

  void ReceiveValues(int j) {
    exchange_.Receive(Rank(j), nullptr, 0);
    uint8_t* const arrived = arrived_.encoded + static_cast<size_t>(j) * arrived_.stride;
    for (size_t b = 0; b < Batches(Own()); ++b) {
      const Batch batch = BatchAt(t_.codec(), arrived, Own(), b);
      exchange_.Receive(Rank(j), batch.encoded, batch.bytes, [this, j, batch](size_t received) {
        if (received < batch.bytes) return;
        ++received_[static_cast<size_t>(j)];
        SumReady();
      });
    }
  }

  void ReceiveSums(int j) {
    for (size_t b = 0; b < Batches(t_.Count(j)); ++b) {
      const Batch sums = BatchAt(t_.sums_codec(), sums_[static_cast<size_t>(j)], t_.Count(j), b);
      exchange_.Receive(Rank(j), sums.encoded, sums.bytes, [this, j, sums](size_t received) {
        if (received < sums.bytes) return;
        const Timed timed(&coding_);
        coder_.DecodeBatch(j, sums);
      });
    }
  }

  bool Ready() {
    bool ready = summed_ < Batches(Own());
    ForOthers([&](int j) { ready = ready && received_[static_cast<size_t>(j)] > summed_; });
    return ready;
  }

  void SumReady() {
    for (; Ready(); ++summed_) {
      const auto me = static_cast<size_t>(members_.me);
      const Batch sums = BatchAt(t_.sums_codec(), sums_[me], Own(), summed_);
      const Timed timed(&coding_);
      coder_.AddUp(sums, arrived_);
      ForOthers([&](int j) {
        exchange_.Send(Rank(j), sums.encoded, sums.bytes, [this, sums] {
          const Timed timed(&coding_);
          coder_.Complete(sums);
        });
      });
    }
  }

  Fabric& fabric_;
  Exchange exchange_;
  const Members& members_;
  const CodedTransfer& t_;
  Coder& coder_;
  const int size_;
  const size_t batch_;  // the number of values in a batch, a multiple of the chunk size
  Coder::Arrived arrived_{};
  std::vector<uint8_t*> sent_;  // for each part, the encoded values that this rank sends
  std::vector<uint8_t*> sums_;  // for each part, the encoded sums
  // For each member, the number of batches for this rank's part that have arrived from the member.
  std::vector<size_t> received_;
  size_t summed_ = 0;   // the number of batches of this rank's part that have been summed
  int64_t coding_ = 0;  // the time spent on encoding, decoding and summing, in nanoseconds
};

}  // namespace

void CheckCompressible(const Operation& operation) {
  const Fingerprint& fingerprint = operation.fingerprint;
  const size_t error = operation.compression->error.bytes();
  CheckCodec(operation.compression->codec);
  if (fingerprint.type != DType::kFloat32 || fingerprint.op != ReduceOp::kSum) {
    throw Error(Code::kInvalidArgument,
                std::string("Sums of float32 can be compressed. Received: a ") +
                    NameOf(fingerprint.op) + " of " + NameOf(fingerprint.type) + ".");
  }
  if (operation.in.bytes() != operation.out.bytes()) {
    throw Error(Code::kInvalidArgument,
                "The result of an all-reduce must be as large as its input.");
  }
  if (error != 0 && operation.compression->codec.unit) {
    throw Error(Code::kInvalidArgument, "Majority votes do not support error feedback.");
  }
  if (error != 0 && error != operation.in.bytes()) {
    throw Error(Code::kInvalidArgument,
                "The error must be as large as the values. Received: " + std::to_string(error) +
                    " bytes for " + std::to_string(operation.in.bytes()) + ".");
  }
}

bool IsEncoded(const Topology& topology, const Compression& compression) {
  return compression.within_hosts ? topology.size > 1 : topology.hosts.size() > 1;
}

void RunCompressed(Fabric& fabric, const Fingerprint& joined, const Members& members,
                   const Transfer& transfer, const Compression& compression, size_t error_begin) {
  HostCoder on_host(fabric.link_scratch);
  Coder& coder = compression.coder ? *compression.coder : static_cast<Coder&>(on_host);
  Compressed(fabric, joined, members, CodedTransfer(transfer, members, compression, error_begin),
             coder)();
}

}  // namespace tfdist
