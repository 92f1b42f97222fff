// Collectives of what is on a GPU, through the host's memory: there wherever a GPU is.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "collective/operation.h"
#include "device/gpu.h"
#include "device/growing.h"
#include "guard.h"

namespace tfdist {

class HostStaged {
 public:
  // Runs an operation whose memory is the host's.
  using OnHost = std::function<void(Operation&)>;

  // Args: what ends waits early.
  HostStaged(const Gpu& gpu, Guard& guard);

  // Runs an operation whose memory is the GPU's. An all-reduce goes in chunks, so that one is reduced
  // while the next comes and the last goes back.
  void Run(Operation& operation, const OnHost& on_host);

 private:
  struct Chunk {
    explicit Chunk(const Gpu& gpu);
    MappedMemory memory;
    DeviceEvent fetched, returned;
  };
  void InChunks(const Operation& operation, const OnHost& on_host);
  void Whole(Operation& operation, const OnHost& on_host);
  char* Take(Growing<MappedMemory>& memory, size_t bytes);
  void Fetch(const ConstPieces& from, size_t begin, size_t bytes, char* to);
  void Return(const char* from, const Pieces& to, size_t begin, size_t bytes);

  const Gpu& gpu_;
  Guard& guard_;
  DeviceStream down_, up_;
  DeviceEvent fetched_, returned_;
  static constexpr size_t kChunks = 3;
  std::unique_ptr<Chunk> chunks_[kChunks];
  Growing<MappedMemory> in_, out_, error_;
};

}  // namespace tfdist
