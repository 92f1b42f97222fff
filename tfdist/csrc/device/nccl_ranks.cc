#include "device/nccl_ranks.h"

#include <algorithm>
#include <functional>

#include "collective/coder.h"
#include "device/compressed_path.h"
#include "device/fusion.h"
#include "device/gpu.h"
#include "device/host_staged.h"
#include "device/peers.h"
#include "error.h"

namespace tfdist {
namespace {

constexpr size_t kFloat = sizeof(float);
// The maximum number of values that one launch of a kernel encodes, sums or decodes. A larger
// number would need more scratch memory, and a smaller number would need more launches.
constexpr size_t kMaxValues = size_t{256} << 10;
// The size in bytes of the memory for the lists of all pending operations. It is enough for lists
// with 16,384 tensors.
constexpr size_t kListBytes = size_t{256} << 10;

// Returns the members with which this rank exchanges encoded values: the ranks, one from each
// group, that have the same share as this rank. If this rank has no share, it exchanges nothing.
// The function then returns the first rank of each group, because only the sizes of their parts are
// needed.
Members MembersFor(const Topology& groups, const ExactShares& exact) {
  const size_t place = exact.HasShare() ? static_cast<size_t>(groups.my_place()) : 0;
  Members members;
  for (const auto& group : groups.hosts) members.ranks.push_back(group[place]);
  members.me = groups.host_of[static_cast<size_t>(groups.rank)];
  return members;
}

}  // namespace

// The resources on one GPU that all operations share.
struct NcclCoded::Lane {
  explicit Lane(const DeviceRank& of)
      : rank(of), codec(*of.gpu, *of.kernels, of.stream), zero(*of.gpu, sizeof(uint64_t)) {}

  const DeviceRank& rank;
  TransferCodec codec;
  const DeviceMemory zero;
  Growing<DeviceMemory> memory;
  cuda::Address begin = 0;  // the address of the memory that `memory` has returned
};

// The part of one GPU in an operation: the GPU sums a share of the values exactly within its group,
// and takes part in the compressed all-reduce of this share between the groups.
class NcclCoded::Share {
 public:
  // Args: groups: a topology in which the ranks of each group form a "host"; part: the operation's
  // part for this GPU.
  Share(const Topology& groups, const Operation& part)
      : exact_(groups, part),
        sums_first_(groups.hosts.size() < static_cast<size_t>(groups.size)),
        members_(MembersFor(groups, exact_)),
        t_(transfer_, members_, *part.compression, exact_.begin()),
        size_(t_.members()) {
    transfer_.scatter = transfer_.gather = true;
    transfer_.type = DType::kFloat32;
    transfer_.in = part.in;
    transfer_.out = part.out;
    const auto members = static_cast<size_t>(size_);
    const size_t most = (exact_.LargestShare() / kFloat + members - 1) / members;
    slot_ = Aligned(std::max(EncodedBytes(t_.codec(), most), EncodedBytes(t_.sums_codec(), most)));
  }

  bool SumsFirst() const { return sums_first_; }
  // `Bytes` returns the size of the device memory that this operation needs, and `ListBytes`
  // returns the size of its lists. Both are the same on all ranks. The memory contains the exact
  // sums, the encoded values that this rank receives from each member, and the encoded values that
  // it sends to each member. When the encoded values have been sent to a member, the encoded sums
  // from this member are received into the same memory.
  size_t Bytes() const {
    return (sums_first_ ? exact_.Bytes() : 0) + 2 * static_cast<size_t>(size_) * slot_;
  }
  size_t ListBytes() const { return TransferCodec::ListBytes(t_); }

  void Begin(Lane& lane) {
    lane_ = &lane;
    exact_.Begin(lane.rank, lane.begin);
    if (sums_first_) {
      transfer_.out = exact_.sums();
      transfer_.in = transfer_.out.Const();
    }
    transfer_.part_bytes = CutEvenly(transfer_.in.bytes(), kFloat, size_, size_);
    lane.codec.Begin(t_);
  }
  void ExchangeExactValues() { exact_.ExchangeValues(); }
  void SumExactly() { exact_.AddUp(lane_->zero.address()); }
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
  void ExchangeExactSums() { exact_.ExchangeSums(); }

 private:
  int me() const { return t_.me(); }
  template <typename Use>
  void ForOthers(Use use) const {
    if (!exact_.HasShare()) return;
    for (int step = 1; step < size_; ++step) use((me() + step) % size_);
  }
  // Calls `use(begin, count)` for each batch of member j's part. A batch consists of whole chunks,
  // unless it ends at the end of the part.
  template <typename Use>
  void ForBatches(int j, Use use) const {
    if (!exact_.HasShare()) return;
    const size_t batch = kMaxValues / t_.chunk() * t_.chunk();
    for (size_t begin = 0; begin < t_.Count(j); begin += batch) {
      use(begin, std::min(batch, t_.Count(j) - begin));
    }
  }
  cuda::Address Arrived(int j) const {
    const size_t before = sums_first_ ? exact_.Bytes() : 0;
    return lane_->begin + before + static_cast<size_t>(j) * slot_;
  }
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

  ExactShares exact_;
  const bool sums_first_;
  const Members members_;
  Transfer transfer_;
  const CodedTransfer t_;
  const int size_;
  size_t slot_ = 0;
  Lane* lane_ = nullptr;
};

NcclCoded::NcclCoded(const Topology& topology, const Ranks& ranks) : ranks_(ranks) {
  const auto size = static_cast<size_t>(topology.size);
  std::vector<int> processes;
  for (size_t rank = 0; rank < size; ++rank) {
    processes.push_back(static_cast<int>(rank / ranks.size()));
  }
  for (size_t i = 0; i < ranks.size(); ++i) {
    const int rank = topology.rank + static_cast<int>(i);
    hosts_.push_back(Topology::From(rank, topology.names, topology.host_of));
    processes_.push_back(Topology::From(rank, topology.names, processes));
  }
}

NcclCoded::~NcclCoded() = default;

bool NcclCoded::Takes(const Parts& parts) const {
  for (const auto& group : Groups(0, *parts[0]).hosts) {
    if (group.size() > device::kMaxRanks) return false;
  }
  if (parts[0]->in.bytes() == 0) return false;
  const Share share(Groups(0, *parts[0]), *parts[0]);
  return share.ListBytes() <= kListBytes && share.Bytes() < refused_;
}

bool NcclCoded::IsFull(const Parts& parts) const {
  const Share share(Groups(0, *parts[0]), *parts[0]);
  if (share.Bytes() > agreed_) return true;
  return lanes_[0]->codec.list_bytes_left() < share.ListBytes();
}

bool NcclCoded::MakeRoom(Fabric& fabric, const Operation& operation, const Parts& parts,
                         std::string* lack) {
  const size_t bytes = Share(Groups(0, *parts[0]), *parts[0]).Bytes();
  if (bytes <= agreed_) {
    if (IsFull(parts)) {
      for (const auto& lane : lanes_) lane->codec.Restart();
    }
    return true;
  }
  try {
    Allocate(bytes);
  } catch (const Error& error) { *lack = error.what(); }
  if (AllAgree(fabric, operation, lack->empty())) {
    agreed_ = bytes;
    return true;
  }
  // At least one rank does not have enough memory. A failed allocation also loses the earlier
  // memory of this rank, so all ranks free their memory, in order to remain in the same state.
  lanes_.clear();
  agreed_ = 0;
  refused_ = bytes;
  return false;
}

void NcclCoded::Allocate(size_t bytes) {
  lanes_.resize(ranks_.size());
  for (size_t i = 0; i < lanes_.size(); ++i) {
    const DeviceRank& rank = *ranks_[i];
    if (!rank.kernels) throw Error(Code::kUnavailable, rank.lack + ".");
    try {
      if (!lanes_[i]) lanes_[i] = std::make_unique<Lane>(rank);
      lanes_[i]->begin = lanes_[i]->memory.Take(*rank.gpu, bytes).address();
      lanes_[i]->codec.MakeRoom(kMaxValues, kListBytes);
    } catch (const Error& error) {
      throw NoRoomForCodes(*rank.gpu, bytes + TransferCodec::RoomBytes(kMaxValues), error);
    }
  }
}

void NcclCoded::Launch(const Parts& parts) {
  std::vector<std::unique_ptr<Share>> shares;
  std::vector<NcclGroup*> groups;
  for (size_t i = 0; i < parts.size(); ++i) {
    shares.push_back(std::make_unique<Share>(Groups(i, *parts[i]), *parts[i]));
    shares.back()->Begin(*lanes_[i]);
    groups.push_back(ranks_[i]->nccl.get());
  }
  const auto each = [&](void (Share::*step)()) {
    for (const auto& share : shares) (share.get()->*step)();
  };
  const auto at_once = [&](void (Share::*step)()) {
    NcclGroup::Grouped(groups, [&] { each(step); });
  };
  const bool sums_first = shares[0]->SumsFirst();
  if (sums_first) {
    at_once(&Share::ExchangeExactValues);
    each(&Share::SumExactly);
  }
  each(&Share::Encode);
  at_once(&Share::ExchangeValues);
  each(&Share::Sum);
  at_once(&Share::ExchangeSums);
  each(&Share::Decode);
  if (sums_first) at_once(&Share::ExchangeExactSums);
}

const Topology& NcclCoded::Groups(size_t gpu, const Operation& part) const {
  return part.compression->within_hosts ? processes_[gpu] : hosts_[gpu];
}

using Tensor = KernelAllReduce::Tensor;

NcclRanks::NcclRanks(Fabric& fabric, const Operation& operation,
                     std::vector<std::unique_ptr<DeviceRank>>& ranks, const Setup& setup,
                     Guard& guard)
    : ranks_(ranks), buffer_bytes_(setup.buffer_bytes), siblings_(guard) {
  const auto join = [&](size_t i) {
    NcclGroup::Setup group{ranks_[i]->gpu.get(), setup.id, static_cast<int>(setup.first + i),
                           setup.size, setup.timeout_seconds};
    group.guard = &siblings_;
    ranks_[i]->nccl = std::make_unique<NcclGroup>(group);
  };
  AtOnce(ranks_.size(), join, &siblings_);
  if (setup.fuses) MakeFusion(fabric, operation, setup);
}

// Creates the fusion buffers. They exist either on all ranks or on none. If a GPU of any rank has
// no kernels or not enough memory, no rank has a fusion buffer, and each tensor is reduced
// separately.
void NcclRanks::MakeFusion(Fabric& fabric, const Operation& operation, const Setup& setup) {
  bool from_nccl = true;
  std::string lack;
  for (const auto& rank : ranks_) {
    try {
      if (!rank->kernels) throw Error(Code::kUnavailable, rank->lack);
      rank->fusion =
          std::make_unique<FusionBuffer>(*rank->gpu, *rank->kernels, *rank->nccl, buffer_bytes_);
      from_nccl = from_nccl && rank->fusion->is_from_nccl();
    } catch (const Error& error) { lack = ClauseOf(error); }
  }
  lack = FirstLack(fabric, operation, lack);
  if (!lack.empty()) {
    for (const auto& rank : ranks_) rank->fusion = nullptr;
    if (setup.first == 0 && setup.warn) {
      setup.warn("NCCL reduces each small tensor separately, since " + lack + ".");
    }
  } else if (AllAgree(fabric, operation, from_nccl)) {
    const auto enter = [this](size_t i) {
      ranks_[i]->nccl->Register(ranks_[i]->fusion->address(), buffer_bytes_);
    };
    AtOnce(ranks_.size(), enter, &siblings_);
  }
}

void NcclRanks::Launch(const Fingerprint& asked, const Parts& parts) {
  if (asked.kind == Kind::kAllReduce && ranks_[0]->fusion) return LaunchFused(asked, parts);
  NcclGroup::Grouped(Groups(), [&] {
    for (size_t i = 0; i < parts.size(); ++i) Call(asked, *parts[i], *ranks_[i]);
  });
}

// Reduces the small tensors in lists, and the large tensors separately. All ranks divide their
// tensors in the same way.
void NcclRanks::LaunchFused(const Fingerprint& asked, const Parts& parts) {
  std::vector<Fused> fused;
  for (const Operation* part : parts) fused.push_back(Fuse(TensorsOf(*part), buffer_bytes_));
  const auto reduce = [&](DeviceRank& rank, const Tensor& tensor) {
    rank.nccl->AllReduce(tensor.in, tensor.out, tensor.bytes / SizeOf(asked.type), asked.type,
                         asked.op, rank.stream.get());
  };
  if (!fused[0].alone.empty()) {
    NcclGroup::Grouped(Groups(), [&] {
      for (size_t i = 0; i < parts.size(); ++i) {
        for (const Tensor& tensor : fused[i].alone) reduce(*ranks_[i], tensor);
      }
    });
  }
  for (size_t number = 0; number < fused[0].lists.size(); ++number) {
    const auto each = [&](const std::function<void(DeviceRank&, const device::List&)>& use) {
      for (size_t i = 0; i < parts.size(); ++i) use(*ranks_[i], fused[i].lists[number]);
    };
    each([](DeviceRank& rank, const device::List& list) {
      rank.fusion->Pack(list, rank.stream.get());
    });
    NcclGroup::Grouped(Groups(), [&] {
      each([&](DeviceRank& rank, const device::List& list) {
        const cuda::Address buffer = rank.fusion->address();
        reduce(rank, {buffer, buffer, list.vectors * device::kVectorBytes});
      });
    });
    each([](DeviceRank& rank, const device::List& list) {
      rank.fusion->Unpack(list, rank.stream.get());
    });
  }
}

void NcclRanks::Call(const Fingerprint& asked, const Operation& part, DeviceRank& rank) const {
  NcclGroup& nccl = *rank.nccl;
  cuda::Stream* const stream = rank.stream.get();
  const size_t element = SizeOf(asked.type);
  const cuda::Address in = AddressOf(part.in), out = AddressOf(part.out);
  switch (asked.kind) {
    case Kind::kAllReduce:
      for (const Tensor& tensor : TensorsOf(part)) {
        nccl.AllReduce(tensor.in, tensor.out, tensor.bytes / element, asked.type, asked.op, stream);
      }
      break;
    case Kind::kReduceScatter:
      nccl.ReduceScatter(in, out, part.out.bytes() / element, asked.type, asked.op, stream);
      break;
    case Kind::kBroadcast:
      nccl.Broadcast(in, out, part.in.bytes(), DType::kUint8, asked.root, stream);
      break;
    case Kind::kAllGather:
      return Gather(part, rank);
    case Kind::kSend:
      if (part.in.bytes() > 0) nccl.Send(in, part.in.bytes(), DType::kUint8, part.peer, stream);
      break;
    case Kind::kReceive:
      if (part.out.bytes() > 0) {
        nccl.Recv(out, part.out.bytes(), DType::kUint8, part.peer, stream);
      }
      break;
    default:
      break;
  }
}

// Gathers rows from all ranks. The all-gather of NCCL requires that all ranks send the same number
// of rows. If the numbers differ, each rank broadcasts its rows instead.
void NcclRanks::Gather(const Operation& part, DeviceRank& rank) const {
  NcclGroup& nccl = *rank.nccl;
  cuda::Stream* const stream = rank.stream.get();
  const cuda::Address in = AddressOf(part.in), out = AddressOf(part.out);
  const std::vector<size_t>& rows = part.received_rows;
  const auto is_first = [&rows](size_t each) { return each == rows[0]; };
  if (std::all_of(rows.begin(), rows.end(), is_first)) {
    if (rows[0] * part.row_bytes == 0) return;
    return nccl.AllGather(in, out, rows[0] * part.row_bytes, DType::kUint8, stream);
  }
  size_t begin = 0;
  for (size_t root = 0; root < rows.size(); ++root) {
    const size_t bytes = rows[root] * part.row_bytes;
    if (bytes > 0) {
      nccl.Broadcast(in, out + begin, bytes, DType::kUint8, static_cast<int>(root), stream);
    }
    begin += bytes;
  }
}

std::vector<NcclGroup*> NcclRanks::Groups() const {
  std::vector<NcclGroup*> groups;
  for (const auto& rank : ranks_) groups.push_back(rank->nccl.get());
  return groups;
}

}  // namespace tfdist
