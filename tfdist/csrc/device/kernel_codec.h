// Encodes, sums and decodes by kernels. All memory is on the GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "device/gpu.h"
#include "device/kernels/coding.h"
#include "device/kernels/runs.h"

namespace tfdist {

// The names of its kernels.
std::vector<const char*> CodecKernelNames();

class KernelCodec {
 public:
  // Args: room: as much as `RoomBytes` says of the most values that are given at once.
  KernelCodec(const KernelModule& kernels, cuda::Stream* stream)
      : kernels_(kernels), stream_(stream) {}
  static constexpr size_t RoomBytes(size_t values) {
    return device::kRooms * values * sizeof(float);
  }

  // Each has the stream do its work, and returns at once. Args: error: a run of none for no feedback.
  void Encode(const device::Batch& batch, const device::Place& in, const device::Place& error,
              cuda::Address room, cuda::Address to) const;
  void Decode(const Codec& codec, size_t count, cuda::Address from, const device::Place& out,
              cuda::Address room) const;
  // Everyone's values, of which the own are `in`, encoded again by the codec of the batch, and decoded
  // into `out`. Args: votes: whether a sum is the sign that most values have.
  void Sum(const device::Batch& batch, const device::Arrived& arrived, bool votes,
           const device::Place& in, const device::Place& error, const device::Place& out,
           cuda::Address room, cuda::Address to) const;

 private:
  template <typename... Arguments>
  void Launch(const std::string& name, size_t count, uint32_t block, Arguments... arguments) const;

  const KernelModule& kernels_;
  cuda::Stream* const stream_;
};

}  // namespace tfdist
