// The kernels of a compressed all-reduce, for the values of a transfer where its tensors lie on a GPU.
#pragma once

#include <cstddef>

#include "collective/coder.h"
#include "device/gpu.h"
#include "device/growing.h"
#include "device/kernel_codec.h"
#include "error.h"

namespace tfdist {

class TransferCodec {
 public:
  TransferCodec(const Gpu& gpu, const KernelModule& kernels, const DeviceStream& stream)
      : gpu_(gpu), stream_(stream), codec_(kernels, stream.get()) {}

  // Bytes that it takes on the GPU to see to so many values at once, and those of a list of a
  // transfer's tensors.
  static size_t RoomBytes(size_t values) { return KernelCodec::RoomBytes(values); }
  static size_t ListBytes(const CodedTransfer& transfer);

  // May free what the stream uses. Args: list_bytes: of all transfers that are given before `Restart`.
  void MakeRoom(size_t values, size_t list_bytes);
  // Bytes that are left for lists, and all of them again, once the stream has done what it was given.
  size_t list_bytes_left() const { return most_listed_ - listed_; }
  void Restart() { listed_ = 0; }

  // Before anything else of a transfer, which stays until the last call for it. Each has the stream do
  // its work, and returns at once.
  void Begin(const CodedTransfer& transfer);
  // Values [begin, begin + count) of member j's part: whole chunks, unless the part ends.
  void Encode(int j, size_t begin, size_t count, cuda::Address to) const;
  // The same of the own part, of which everyone's encoded values lie `stride` bytes behind one another.
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

}  // namespace tfdist
