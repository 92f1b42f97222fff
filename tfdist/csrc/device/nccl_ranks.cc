#include "device/nccl_ranks.h"

#include <algorithm>
#include <functional>

#include "device/fusion.h"
#include "device/peers.h"
#include "error.h"

namespace tfdist {

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

// On all ranks or on none: without kernels or room, each tensor goes by itself.
void NcclRanks::MakeFusion(Fabric& fabric, const Operation& operation, const Setup& setup) {
  bool from_nccl = true;
  std::string lack;
  for (const auto& rank : ranks_) {
    try {
      if (!rank->kernels) throw Error(Code::kUnavailable, rank->lack);
      rank->fusion = std::make_unique<FusionBuffer>(*rank->gpu, *rank->kernels, *rank->nccl,
                                                    buffer_bytes_);
      from_nccl = from_nccl && rank->fusion->is_from_nccl();
    } catch (const Error& error) {
      lack = ClauseOf(error);
    }
  }
  lack = FirstLack(fabric, operation, lack);
  if (!lack.empty()) {
    for (const auto& rank : ranks_) rank->fusion = nullptr;
    if (setup.first == 0 && setup.warn) {
      setup.warn("Each small tensor goes through NCCL by itself, since " + lack + ".");
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

// All ranks cut their buckets alike.
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
        nccl.AllReduce(tensor.in, tensor.out, tensor.bytes / element, asked.type, asked.op,
                       stream);
      }
      break;
    case Kind::kReduceScatter:
      nccl.ReduceScatter(in, out, part.out.bytes() / element, asked.type, asked.op, stream);
      break;
    case Kind::kBroadcast:
      nccl.Broadcast(in, out, part.in.bytes(), DType::kUint8, asked.root, stream);
      break;
    case Kind::kAllGather: return Gather(part, rank);
    case Kind::kSend:
      if (part.in.bytes() > 0) nccl.Send(in, part.in.bytes(), DType::kUint8, part.peer, stream);
      break;
    case Kind::kReceive:
      if (part.out.bytes() > 0) {
        nccl.Recv(out, part.out.bytes(), DType::kUint8, part.peer, stream);
      }
      break;
    default: break;
  }
}

// Where ranks bring different numbers of rows, NCCL has no gather.
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
