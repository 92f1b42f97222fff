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

// Runs the kernels of a compressed all-reduce, for a transfer of tensors in device memory.
class TransferCodec {
 public:
  TransferCodec(const Gpu& gpu, const KernelModule& kernels, const DeviceStream& stream)
      : gpu_(gpu), stream_(stream), codec_(kernels, stream.get()) {}

  // The device memory, in bytes, needed to process this many values at once, and for a list of a
  // transfer's tensors.
  static size_t RoomBytes(size_t values) { return KernelCodec::RoomBytes(values); }
  static size_t ListBytes(const CodedTransfer& transfer);

  // May free memory that the stream uses. Args: list_bytes: the size of the lists of all transfers
  // until the next `Restart`.
  void MakeRoom(size_t values, size_t list_bytes);
  // The remaining bytes for lists. All bytes are free again once the stream has finished its work.
  size_t list_bytes_left() const { return max_list_bytes_ - listed_; }
  void Restart() { listed_ = 0; }

  // Begins a transfer, which must live until the last of the following calls for it. Each call
  // queues work in the stream and returns at once.
  void Begin(const CodedTransfer& transfer);
  // Encodes values [begin, begin + count) of member j's part: whole chunks, unless the part ends.
  void Encode(int j, size_t begin, size_t count, cuda::Address to) const;
  // Sums such values of this rank's part. The ranks' encoded values are `stride` bytes apart.
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
  size_t listed_ = 0, max_list_bytes_ = 0;
  device::Run in_{}, out_{}, error_{};
};

// Returns the error for a GPU without memory for encoded values. Args: bytes: the requested size.
Error NoRoomForCodes(const Gpu& gpu, size_t bytes, const Error& error);

// Compressed all-reduces of device memory: kernels encode, sum and decode; only encoded values pass
// through host memory and between ranks.
class DeviceCoder : public Coder {
 public:
  using OnHost = std::function<void(Operation&)>;

  // Args: a guard that ends waits early.
  DeviceCoder(const Gpu& gpu, const KernelModule& kernels, Guard& guard);

  // Whether this class can run an operation: all summed values must be encoded. Other ranks may run
  // the operation on the host, since both ways send the same bytes.
  static bool Takes(const Topology& topology, const Operation& operation);
  // Allocates memory for an operation. Throws Error if there is not enough.
  void MakeRoom(const Topology& topology, const Operation& operation);

  // Runs an operation on device memory. Args: a function that runs the operation on the host and
  // calls this object for all access to the memory.
  void Run(Operation& operation, const OnHost& on_host);

  uint8_t* Begin(const CodedTransfer& transfer) override;
  // More than on the host, because of the cost of each launch.
  size_t ChunksAtOnce() const override { return 4; }
  void Foresee(int j, const Batch& batch) override;
  void EncodeBatch(int j, const Batch& batch) override;
  void AddUp(const Batch& sums, const Arrived& arrived) override;
  void Complete(const Batch& sums) override;
  void DecodeBatch(int j, const Batch& sums) override;

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
  uint8_t* encoded_ = nullptr;   // in host memory,
  cuda::Address on_device_ = 0;  // and its counterpart on the GPU
  // Events that mark the arrival of encoded values in host memory, by address.
  std::unordered_map<const uint8_t*, DeviceEvent*> fetched_;
  std::vector<std::unique_ptr<DeviceEvent>> events_;
};

// Selects the transport of a communicator's compressed all-reduces, and runs them: encoded values
// move between GPUs through NCCL, or over the host's links.
class CompressedPath {
 public:
  // Args: ranks: this process's GPUs; guard: ends waits early.
  CompressedPath(const DeviceSetup& setup, const Routes::Ranks& ranks, Routes& routes, Guard& guard)
      : setup_(setup), ranks_(ranks), routes_(routes), guard_(guard) {}

  // Whether an operation uses NCCL. All ranks decide this together, and allocate memory for it.
  // Args: settle: waits for earlier launches.
  bool GoesByNccl(Fabric& fabric, const Operation& operation, const Parts& parts,
                  const std::function<void()>& settle);
  // Queues an operation that uses NCCL in the GPUs' streams.
  void Launch(const Parts& parts) { by_nccl_->Launch(parts); }

  // Runs an operation that does not use NCCL, if this process's kernels can; returns whether they
  // can. Args: a function that runs an operation on the host.
  bool RunOverLinks(const Topology& topology, Operation& operation,
                    const DeviceCoder::OnHost& on_host);

 private:
  void Announce(const std::string& lack);

  const DeviceSetup& setup_;
  const Routes::Ranks& ranks_;
  Routes& routes_;
  Guard& guard_;
  std::unique_ptr<NcclCoded> by_nccl_;       // created on first use
  std::unique_ptr<DeviceCoder> over_links_;  // the same
  bool announced_ = false;
};

}  // namespace tfdist
