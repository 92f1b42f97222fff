// Runs compressed all-reduces of tensors in device memory. The GPU encodes, sums and decodes the
// values, so that only encoded values, which are smaller, are transferred.
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

// Uses kernels to encode, sum and decode the values of a transfer. The tensors of the transfer must
// be in device memory.
class TransferCodec {
 public:
  TransferCodec(const Gpu& gpu, const KernelModule& kernels, const DeviceStream& stream)
      : gpu_(gpu), stream_(stream), codec_(kernels, stream.get()) {}

  // `RoomBytes` returns the size of the scratch memory that the kernels need on the GPU to encode,
  // sum or decode `values` values together. `ListBytes` returns the size of the lists that describe
  // the tensors of a transfer to the kernels. Both sizes are in bytes.
  static size_t RoomBytes(size_t values) { return KernelCodec::RoomBytes(values); }
  static size_t ListBytes(const CodedTransfer& transfer);

  // Allocates device memory to process up to `values` values together, and for lists. Call this
  // function only when the stream has finished its work, because the function may free the memory
  // that it has allocated before.
  // Args: list_bytes: the total size of the lists of all transfers that begin before the next call
  // of `Restart`.
  void MakeRoom(size_t values, size_t list_bytes);
  // Returns the number of bytes that are left for the lists of further transfers. `Restart` makes
  // all bytes available again. Call it only when the stream has finished its work, because the
  // kernels in the stream read the lists.
  size_t list_bytes_left() const { return max_list_bytes_ - listed_; }
  void Restart() { listed_ = 0; }

  // Begins a transfer. The object `transfer` must live until the last call of `Encode`, `Sum` or
  // `Decode` for this transfer. `Begin`, `Encode`, `Sum` and `Decode` only queue work in the
  // stream, and return immediately.
  void Begin(const CodedTransfer& transfer);
  // Encodes the values [begin, begin + count) of member j's part, and writes the encoded values to
  // the address `to`. The values must be whole chunks, unless they end at the end of the part.
  void Encode(int j, size_t begin, size_t count, cuda::Address to) const;
  // Sums the values [begin, begin + count) of this member's part over all members. Encodes the
  // sums, and decodes the encoded sums into this member's result.
  // Args: first: the address of the first member's encoded values of this part; stride: the number
  // of bytes from the encoded values of one member to those of the next member; to: the address for
  // the encoded sums.
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

// Returns the error to throw if a GPU does not have enough memory for encoded values.
// Args: bytes: the number of requested bytes; error: the error of the failed allocation.
Error NoRoomForCodes(const Gpu& gpu, size_t bytes, const Error& error);

// Runs compressed all-reduces of device memory. Kernels encode, sum and decode the values on the
// GPU. Only the encoded values are copied to host memory, and the host sends them to the other
// ranks.
class DeviceCoder : public Coder {
 public:
  using OnHost = std::function<void(Operation&)>;

  // Args: guard: a `Guard` that is checked during every wait, and can end the wait by throwing an
  // Error.
  DeviceCoder(const Gpu& gpu, const KernelModule& kernels, Guard& guard);

  // Returns whether this class can run an operation. It cannot if there is only one rank, or if the
  // ranks of a host sum their values before the values are encoded. Other ranks may run the same
  // operation with `HostCoder`, because both classes send the same bytes.
  static bool Takes(const Topology& topology, const Operation& operation);
  // Allocates the memory for an operation. Throws Error if there is not enough memory.
  void MakeRoom(const Topology& topology, const Operation& operation);

  // Runs an operation on device memory, and waits for its result.
  // Args: on_host: a function that runs the operation on the host. It calls this object to encode,
  // sum and decode, so it never accesses the device memory itself.
  void Run(Operation& operation, const OnHost& on_host);

  uint8_t* Begin(const CodedTransfer& transfer) override;
  // Returns more chunks than `HostCoder` does, because each batch requires separate launches of
  // kernels. Larger batches require fewer launches.
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
  uint8_t* encoded_ = nullptr;   // the address of the encoded values in host memory
  cuda::Address on_device_ = 0;  // the address of the encoded values in device memory
  // Maps the address of encoded values in host memory to an event, which passes when the GPU has
  // copied the encoded values to this address.
  std::unordered_map<const uint8_t*, DeviceEvent*> fetched_;
  std::vector<std::unique_ptr<DeviceEvent>> events_;
};

// Selects the transport of a communicator's compressed all-reduces, and runs them. NCCL sends the
// encoded values from GPU to GPU. If NCCL is not used, the encoded values are copied to host memory
// and sent over the links between the ranks.
class CompressedPath {
 public:
  // Args: ranks: the GPUs of this process; guard: a `Guard` that is checked during every wait, and
  // can end the wait by throwing an Error.
  CompressedPath(const DeviceSetup& setup, const Routes::Ranks& ranks, Routes& routes, Guard& guard)
      : setup_(setup), ranks_(ranks), routes_(routes), guard_(guard) {}

  // Returns whether an operation will use NCCL. The result is the same on all ranks, because they
  // decide this together. If the result is true, this function has also allocated memory for the
  // operation.
  // Args: settle: a function that waits until all earlier launches have ended. It is called before
  // the memory of earlier launches is reused.
  bool GoesByNccl(Fabric& fabric, const Operation& operation, const Parts& parts,
                  const std::function<void()>& settle);
  // Queues an operation in the streams of this process's GPUs. `GoesByNccl` must have returned true
  // for this operation.
  void Launch(const Parts& parts) { by_nccl_->Launch(parts); }

  // Runs an operation that does not use NCCL, if the kernels of this process can encode its values.
  // Returns whether the operation has run. If it has not, the caller must run it in another way.
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
