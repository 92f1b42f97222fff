// Compressed collectives of device memory.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "collective/coder.h"
#include "collective/operation.h"
#include "device/device_rank.h"
#include "device/device_setup.h"
#include "device/gpu.h"
#include "device/kernel_launch.h"
#include "device/nccl_ranks.h"
#include "device/routes.h"
#include "error.h"
#include "transport/fabric.h"

namespace tfdist {

// The kernels of a compressed all-reduce, for the values of a transfer where its tensors lie on a
// GPU.
class TransferCodec {
 public:
  TransferCodec(const Gpu& gpu, const KernelModule& kernels, const DeviceStream& stream)
      : gpu_(gpu), stream_(stream), codec_(kernels, stream.get()) {}

  // Bytes that it takes on the GPU to see to so many values at once, and those of a list of a
  // transfer's tensors.
  static size_t RoomBytes(size_t values) { return KernelCodec::RoomBytes(values); }
  static size_t ListBytes(const CodedTransfer& transfer);

  // May free what the stream uses. Args: list_bytes: of all transfers that are given before
  // `Restart`.
  void MakeRoom(size_t values, size_t list_bytes);
  // Bytes that are left for lists, and all of them again, once the stream has done what it was
  // given.
  size_t list_bytes_left() const { return most_listed_ - listed_; }
  void Restart() { listed_ = 0; }

  // Before anything else of a transfer, which stays until the last call for it. Each has the stream
  // do its work, and returns at once.
  void Begin(const CodedTransfer& transfer);
  // Values [begin, begin + count) of member j's part: whole chunks, unless the part ends.
  void Encode(int j, size_t begin, size_t count, cuda::Address to) const;
  // The same of the own part, of which everyone's encoded values lie `stride` bytes behind one
  // another.
  void Sum(size_t begin, size_t count, cuda::Address first, size_t stride, cuda::Address to) const;
  void Decode(int j, size_t begin, size_t count, cuda::Address from) const;

 private:
  device::Batch BatchOf(const Codec& codec, int j, size_t begin, size_t count,
                        CodedTransfer::Stage stage) const;

  const Gpu& gpu_;
  const DeviceStream& stream_;
  const KernelCodec codec_;
  const CodedTransfer* t_ = nullptr;
  Growing<DeviceMemory> rooms_, device_lists_;
  Growing<MappedMemory> host_lists_;
  cuda::Address room_ = 0, device_list_ = 0;
  char* host_list_ = nullptr;
  size_t listed_ = 0, most_listed_ = 0;
  device::Run in_{}, out_{}, error_{};
};

// What is thrown where a GPU has no memory for encoded values. Args: bytes: that were asked for.
Error NoRoomForCodes(const Gpu& gpu, size_t bytes, const Error& error);

// Compressed all-reduces of what is on a GPU: kernels encode, sum and decode, and what passes
// through the host's memory and between ranks is encoded.
class DeviceCoder : public Coder {
 public:
  using OnHost = std::function<void(Operation&)>;

  // Args: what ends waits early.
  DeviceCoder(const Gpu& gpu, const KernelModule& kernels, Guard& guard);

  // Whether it can run an operation: one of which nothing is summed without being encoded. Ranks
  // that run it and such that do so on the host go together: what they send is the same.
  static bool Takes(const Topology& topology, const Operation& operation);
  // Makes room for it. Throws Error where there is none.
  void MakeRoom(const Topology& topology, const Operation& operation);

  // Runs an operation whose memory is the GPU's. Args: how one is run on the host, which asks this
  // for all that touches the memory.
  void Run(Operation& operation, const OnHost& on_host);

  uint8_t* Begin(const CodedTransfer& transfer) override;
  // More than on the host, since each launch takes its time.
  size_t ChunksAtOnce() const override { return 4; }
  void Foresee(int j, const Batch& batch) override;
  void Encode(int j, const Batch& batch) override;
  void AddUp(const Batch& sums, const Arrived& arrived) override;
  void Complete(const Batch& sums) override;
  void Decode(int j, const Batch& sums) override;

 private:
  void Allocate(const CodedTransfer& transfer);
  cuda::Address OnDevice(const uint8_t* encoded) const;
  void Fetch(const Batch& batch);
  void Return(const uint8_t* encoded, size_t bytes) const;
  void AwaitFetched(const Batch& batch);

  const Gpu& gpu_;
  Guard& guard_;
  const DeviceStream stream_;
  TransferCodec codec_;
  DeviceEvent done_;
  const CodedTransfer* t_ = nullptr;
  Growing<MappedMemory> host_encoded_;
  Growing<DeviceMemory> device_encoded_;
  uint8_t* encoded_ = nullptr;   // in the host's memory,
  cuda::Address on_device_ = 0;  // and as much on the GPU
  // When encoded values have come to the host's memory, by where they lie there.
  std::unordered_map<const uint8_t*, DeviceEvent*> fetched_;
  std::vector<std::unique_ptr<DeviceEvent>> events_;
};

// Which way the compressed all-reduces of a communicator go, and what runs them: encoded values go
// from GPU to GPU by NCCL, or over the host's links.
class CompressedPath {
 public:
  // Args: ranks: this process's GPUs; guard: ends waits early.
  CompressedPath(const DeviceSetup& setup, const Routes::Ranks& ranks, Routes& routes, Guard& guard)
      : setup_(setup), ranks_(ranks), routes_(routes), guard_(guard) {}

  // Whether an operation goes by NCCL, as all ranks find out together, and make room for it.
  // Args: settle: waits for what was launched before.
  bool GoesByNccl(Fabric& fabric, const Operation& operation, const Parts& parts,
                  const std::function<void()>& settle);
  // Has the GPUs' streams run one that does.
  void Launch(const Parts& parts) { by_nccl_->Launch(parts); }

  // Runs one that does not, if this process's kernels can. Args: how one is run on the host.
  bool RunOverLinks(const Topology& topology, Operation& operation,
                    const DeviceCoder::OnHost& on_host);

 private:
  void Announce(const std::string& lack);

  const DeviceSetup& setup_;
  const Routes::Ranks& ranks_;
  Routes& routes_;
  Guard& guard_;
  std::unique_ptr<NcclCoded> by_nccl_;       // made when it is used first
  std::unique_ptr<DeviceCoder> over_links_;  // the same
  bool announced_ = false;
};

}  // namespace tfdist
