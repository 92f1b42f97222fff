// Collectives of what is on GPUs, through the host's memory: there wherever a GPU is.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "collective/operation.h"
#include "device/gpu.h"
#include "device/growing.h"
#include "device/parts.h"
#include "guard.h"

namespace tfdist {

class HostStaged {
 public:
  // Runs an operation whose memory is the host's.
  using OnHost = std::function<void(Operation&)>;

  // Args: this process's GPUs, and what ends waits early.
  HostStaged(const std::vector<std::shared_ptr<const Gpu>>& gpus, Guard& guard);

  // Runs an operation whose memory is the GPUs'. An all-reduce goes in chunks, so that one is reduced
  // while the next comes and the last goes back. What several GPUs bring is put together on the host
  // first; messages and all-to-alls are for processes with one.
  // Args: what each GPU brings.
  void Run(const Operation& operation, const Parts& parts,
           const OnHost& on_host);

 private:
  static constexpr size_t kChunks = 3;
  // One GPU's copies to the host and back.
  struct Lane {
    explicit Lane(const Gpu& gpu);
    // When they are needed first.
    void MakeChunks();
    // Has what copies either way wait for the GPU's values, and for room for them.
    void HoldBack(const Operation& part) const;
    void Fetch(const ConstPieces& from, size_t begin, size_t bytes, char* to) const;
    void Return(const char* from, const Pieces& to, size_t begin, size_t bytes) const;

    const Gpu& gpu;
    DeviceStream down, up;
    DeviceEvent fetched, returned;
    struct Chunk {
      explicit Chunk(const Gpu& gpu);
      MappedMemory memory;
      DeviceEvent fetched, returned;
    };
    std::unique_ptr<Chunk> chunks[kChunks];
  };

  void InChunks(const Operation& operation, const Parts& parts,
                const OnHost& on_host);
  void Whole(const Operation& operation, const Parts& parts,
             const OnHost& on_host);
  char* Take(Growing<MappedMemory>& memory, size_t bytes) const;
  char* FetchAll(const Operation& operation, const Parts& parts, size_t* bytes);
  void Join(const Parts& parts, char* in, size_t* bytes,
            Operation* staged) const;

  Guard& guard_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  Growing<MappedMemory> in_, out_, error_;
};

}  // namespace tfdist
