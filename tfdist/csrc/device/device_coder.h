// Compressed all-reduces of what is on a GPU: kernels encode, sum and decode, and what passes through
// the host's memory and between ranks is encoded.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "collective/coder.h"
#include "collective/operation.h"
#include "device/gpu.h"
#include "device/growing.h"
#include "device/transfer_codec.h"
#include "guard.h"
#include "transport/fabric.h"

namespace tfdist {

class DeviceCoder : public Coder {
 public:
  using OnHost = std::function<void(Operation&)>;

  // Args: what ends waits early.
  DeviceCoder(const Gpu& gpu, const KernelModule& kernels, Guard& guard);

  // Whether it can run an operation: one of which nothing is summed without being encoded. Ranks that
  // run it and such that do so on the host go together: what they send is the same.
  static bool Takes(const Topology& topology, const Operation& operation);
  // Makes room for it. Throws Error where there is none.
  void MakeRoom(const Topology& topology, const Operation& operation);

  // Runs an operation whose memory is the GPU's. Args: how one is run on the host, which asks this for
  // all that touches the memory.
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

}  // namespace tfdist
