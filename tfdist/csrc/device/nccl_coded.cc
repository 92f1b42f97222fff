#include "device/nccl_coded.h"

#include <algorithm>
#include <functional>

#include "collective/coder.h"
#include "device/device_coder.h"
#include "device/growing.h"
#include "device/peers.h"
#include "device/transfer_codec.h"
#include "error.h"

namespace tfdist {
namespace {

constexpr size_t kFloat = sizeof(float);
constexpr size_t kAlignment = 16;
// Of one launch. More of them take more room, fewer take more launches.
constexpr size_t kMostValues = size_t{512} << 10;
// Of the lists of all operations that are launched one behind the other: for 16,384 tensors.
constexpr size_t kListBytes = size_t{256} << 10;

Transfer Whole(const Operation& part, const Members& members) {
  Transfer whole;
  const int size = static_cast<int>(members.ranks.size());
  whole.scatter = whole.gather = true;
  whole.part_bytes = CutEvenly(part.in.bytes(), kFloat, size, size);
  whole.type = DType::kFloat32;
  whole.in = part.in;
  whole.out = part.out;
  return whole;
}

}  // namespace

// What a GPU has for all operations.
struct NcclCoded::Lane {
  explicit Lane(const DeviceRank& of)
      : rank(of), codec(*of.gpu, *of.kernels, of.stream) {}

  const DeviceRank& rank;
  TransferCodec codec;
  Growing<DeviceMemory> memory;
  cuda::Address encoded = 0;
};

// What one GPU does of an operation.
class NcclCoded::Share {
 public:
  // Args: rank: the GPU's.
  Share(const Topology& topology, int rank, const Operation& part)
      : members_(MembersWith(topology, rank)),
        transfer_(Whole(part, members_)),
        t_(transfer_, members_, *part.compression, 0),
        size_(t_.members()) {
    size_t most = 0;
    for (int j = 0; j < size_; ++j) most = std::max(most, t_.Count(j));
    const size_t bytes = std::max(EncodedBytes(t_.codec(), most), EncodedBytes(t_.sums_codec(), most));
    slot_ = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  // The same for all ranks: what comes from each, and what goes to each, in whose place then come its
  // sums.
  size_t EncodedTwice() const { return 2 * static_cast<size_t>(size_) * slot_; }
  size_t ListBytes() const { return TransferCodec::ListBytes(t_); }

  void Begin(Lane& lane) {
    lane_ = &lane;
    lane.codec.Begin(t_);
  }
  void Encode() {
    ForOthers([&](int j) {
      ForBatches(j, [&](size_t begin, size_t count) {
        lane_->codec.Encode(j, begin, count, Kept(j) + EncodedBytes(t_.codec(), begin));
      });
    });
  }
  void ExchangeValues() {
    ForOthers([&](int j) {
      Send(Kept(j), EncodedBytes(t_.codec(), t_.Count(j)), j);
      Receive(Arrived(j), EncodedBytes(t_.codec(), t_.Count(me())), j);
    });
  }
  void Sum() {
    ForBatches(me(), [&](size_t begin, size_t count) {
      lane_->codec.Sum(begin, count, Arrived(0), slot_,
                       Kept(me()) + EncodedBytes(t_.sums_codec(), begin));
    });
  }
  void ExchangeSums() {
    ForOthers([&](int j) {
      Send(Kept(me()), EncodedBytes(t_.sums_codec(), t_.Count(me())), j);
      Receive(Kept(j), EncodedBytes(t_.sums_codec(), t_.Count(j)), j);
    });
  }
  void Decode() {
    ForOthers([&](int j) {
      ForBatches(j, [&](size_t begin, size_t count) {
        lane_->codec.Decode(j, begin, count, Kept(j) + EncodedBytes(t_.sums_codec(), begin));
      });
    });
  }

 private:
  static Members MembersWith(const Topology& topology, int rank) {
    Members members = Everyone(topology);
    members.me = rank;
    return members;
  }

  int me() const { return t_.me(); }
  template <typename Use>
  void ForOthers(Use use) const {
    for (int step = 1; step < size_; ++step) use((me() + step) % size_);
  }
  // Whole chunks of a part.
  template <typename Use>
  void ForBatches(int j, Use use) const {
    const size_t batch = kMostValues / t_.chunk() * t_.chunk();
    for (size_t begin = 0; begin < t_.Count(j); begin += batch) {
      use(begin, std::min(batch, t_.Count(j) - begin));
    }
  }
  cuda::Address Arrived(int j) const { return lane_->encoded + static_cast<size_t>(j) * slot_; }
  cuda::Address Kept(int j) const { return Arrived(size_ + j); }

  void Send(cuda::Address from, size_t bytes, int j) const {
    if (bytes > 0) nccl().Send(from, bytes, DType::kUint8, Rank(j), stream());
  }
  void Receive(cuda::Address to, size_t bytes, int j) const {
    if (bytes > 0) nccl().Recv(to, bytes, DType::kUint8, Rank(j), stream());
  }
  int Rank(int j) const { return members_.ranks[static_cast<size_t>(j)]; }
  NcclGroup& nccl() const { return *lane_->rank.nccl; }
  cuda::Stream* stream() const { return lane_->rank.stream.get(); }

  const Members members_;
  const Transfer transfer_;
  const CodedTransfer t_;
  const int size_;
  size_t slot_ = 0;
  Lane* lane_ = nullptr;
};

NcclCoded::NcclCoded(const Topology& topology, const Ranks& ranks)
    : topology_(topology), ranks_(ranks) {}

NcclCoded::~NcclCoded() = default;

bool NcclCoded::Takes(const Operation& operation, const Parts& parts) const {
  return DeviceCoder::Takes(topology_, operation) && operation.in.bytes() > 0 &&
         Share(topology_, topology_.rank, *parts[0]).ListBytes() <= kListBytes;
}

bool NcclCoded::IsFull(const Parts& parts) const {
  const Share share(topology_, topology_.rank, *parts[0]);
  if (lanes_.empty() || share.EncodedTwice() > agreed_) return true;
  return lanes_[0]->codec.list_bytes_left() < share.ListBytes();
}

bool NcclCoded::MakeRoom(Fabric& fabric, const Operation& operation, const Parts& parts,
                         std::string* lack) {
  const size_t bytes = Share(topology_, topology_.rank, *parts[0]).EncodedTwice();
  if (bytes >= refused_) return false;
  if (IsFull(parts)) {
    for (const auto& lane : lanes_) lane->codec.Restart();
  }
  if (bytes <= agreed_) return true;
  try {
    Allocate(bytes);
  } catch (const Error& error) {
    *lack = error.what();
  }
  if (AllAgree(fabric, operation, lack->empty())) {
    agreed_ = bytes;
    return true;
  }
  // Who has found no more has lost what there was.
  agreed_ = 0;
  refused_ = bytes;
  return false;
}

void NcclCoded::Allocate(size_t bytes) {
  if (lanes_.empty()) {
    for (const auto& rank : ranks_) {
      if (!rank->kernels) throw Error(Code::kUnavailable, rank->lack);
    }
    for (const auto& rank : ranks_) lanes_.push_back(std::make_unique<Lane>(*rank));
  }
  for (const auto& lane : lanes_) {
    const Gpu& gpu = *lane->rank.gpu;
    try {
      lane->encoded = lane->memory.Take(gpu, bytes).address();
      lane->codec.MakeRoom(kMostValues, kListBytes);
    } catch (const Error& error) {
      throw NoRoom(bytes + TransferCodec::RoomBytes(kMostValues), gpu, error);
    }
  }
}

void NcclCoded::Launch(const Parts& parts) {
  std::vector<std::unique_ptr<Share>> shares;
  std::vector<NcclGroup*> groups;
  for (size_t i = 0; i < parts.size(); ++i) {
    const int rank = topology_.rank + static_cast<int>(i);
    shares.push_back(std::make_unique<Share>(topology_, rank, *parts[i]));
    shares.back()->Begin(*lanes_[i]);
    groups.push_back(ranks_[i]->nccl.get());
  }
  const auto each = [&](void (Share::*step)()) {
    for (const auto& share : shares) (share.get()->*step)();
  };
  const auto at_once = [&](void (Share::*step)()) {
    NcclGroup::Grouped(groups, [&] { each(step); });
  };
  each(&Share::Encode);
  at_once(&Share::ExchangeValues);
  each(&Share::Sum);
  at_once(&Share::ExchangeSums);
  each(&Share::Decode);
}

}  // namespace tfdist
