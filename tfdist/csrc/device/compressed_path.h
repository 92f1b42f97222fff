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

// Encodes, sums and decodes the values of a transfer with kernels. The tensors of the transfer are
// in device memory.
class TransferCodec {
 public:
  TransferCodec(const Gpu& gpu, const KernelModule& kernels, const DeviceStream& stream)
      : gpu_(gpu), stream_(stream), codec_(kernels, stream.get()) {}

  // `RoomBytes` returns the size of the device memory that is needed to process this number of
  // values together. `ListBytes` returns the size of the device memory for the lists of a
  // transfer's tensors.
  static size_t RoomBytes(size_t values) { return KernelCodec::RoomBytes(values); }
  static size_t ListBytes(const CodedTransfer& transfer);

  // Allocates memory to process up to `values` values together, and memory for lists. This may free
  // memory that the stream still uses.
  // Args: list_bytes: the size of the lists of all transfers until the next `Restart`.
  void MakeRoom(size_t values, size_t list_bytes);
  // Returns the number of bytes that are left for lists. After the stream has finished its work,
  // `Restart` makes all bytes available again.
  size_t list_bytes_left() const { return max_list_bytes_ - listed_; }
  void Restart() { listed_ = 0; }

  // Begins a transfer. The object `transfer` must live until the last call of `Encode`, `Sum` or
  // `Decode` for this transfer. Each of these functions queues work in the stream and returns
  // immediately.
  void Begin(const CodedTransfer& transfer);
  // Encodes values [begin, begin + count) of member j's part. They are whole chunks, unless they
  // end at the end of the part.
  void Encode(int j, size_t begin, size_t count, cuda::Address to) const;
  // Sums values [begin, begin + count) of this rank's part over all ranks, and encodes the sums.
  // The encoded values of two consecutive ranks are `stride` bytes apart.
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

// Returns the error for a GPU that has no memory for encoded values.
// Args: bytes: the size of the requested memory.
Error NoRoomForCodes(const Gpu& gpu, size_t bytes, const Error& error);

// Runs compressed all-reduces of device memory. Kernels encode, sum and decode the values. Only
// encoded values are copied to host memory and sent to other ranks.
class DeviceCoder : public Coder {
 public:
  using OnHost = std::function<void(Operation&)>;

  // Args: guard: ends waits early.
  DeviceCoder(const Gpu& gpu, const KernelModule& kernels, Guard& guard);

  // Returns whether this class can run an operation. This is possible only if the values of all
  // ranks are encoded before they are summed. Other ranks may run the same operation on the host,
  // because both implementations send the same bytes.
  static bool Takes(const Topology& topology, const Operation& operation);
  // Allocates the memory for an operation. Throws Error if there is not enough memory.
  void MakeRoom(const Topology& topology, const Operation& operation);

  // Runs an operation on device memory.
  // Args: on_host: a function that runs the operation on the host. The function uses this object as
  // its coder, so that only this object accesses the device memory.
  void Run(Operation& operation, const OnHost& on_host);

  uint8_t* Begin(const CodedTransfer& transfer) override;
  // A batch has more chunks than on the host, because each launch of a kernel has a cost.
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
  uint8_t* encoded_ = nullptr;   // the encoded values in host memory
  cuda::Address on_device_ = 0;  // the encoded values on the GPU
  // Maps the address of encoded values in host memory to the event that marks their arrival there.
  std::unordered_map<const uint8_t*, DeviceEvent*> fetched_;
  std::vector<std::unique_ptr<DeviceEvent>> events_;
};

// Selects the transport of a communicator's compressed all-reduces, and runs them. The encoded
// values are sent between GPUs through NCCL, or between ranks over links.
class CompressedPath {
 public:
  // Args: ranks: the GPUs of this process; guard: ends waits early.
  CompressedPath(const DeviceSetup& setup, const Routes::Ranks& ranks, Routes& routes, Guard& guard)
      : setup_(setup), ranks_(ranks), routes_(routes), guard_(guard) {}

  // Returns whether an operation uses NCCL. If it does, memory for it has been allocated. All ranks
  // decide this together.
  // Args: settle: waits for earlier launches.
  bool GoesByNccl(Fabric& fabric, const Operation& operation, const Parts& parts,
                  const std::function<void()>& settle);
  // Queues an operation in the GPUs' streams. `GoesByNccl` must have returned true for this
  // operation.
  void Launch(const Parts& parts) { by_nccl_->Launch(parts); }

  // Runs an operation that does not use NCCL, if the kernels of this process can run it. Returns
  // whether they can.
  // Args: on_host: a function that runs an operation on the host.
  bool RunOverLinks(const Topology& topology, Operation& operation,
                    const DeviceCoder::OnHost& on_host);

 private:
  void Announce(const std::string& lack);

  const DeviceSetup& setup_;
  const Routes::Ranks& ranks_;
  Routes& routes_;
  Guard& guard_;
  std::unique_ptr<NcclCoded> by_nccl_;       // created on first use
  std::unique_ptr<DeviceCoder> over_links_;  // created on first use
  bool announced_ = false;
};

}  // namespace tfdist
