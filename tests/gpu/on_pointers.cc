// The kernels on memory of others, such as torch's: what test_torch.py calls. Each function returns
// what has failed, or "".
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "cpp/gpu_ranks.h"
#include "device/gpu.h"
#include "device/kernel_launch.h"

namespace tfdist {
namespace {

constexpr size_t kBuffer = size_t{1} << 18;  // larger tensors go in pieces
constexpr double kSeconds = 60;

// The first GPU, with the kernels.
struct Opened {
  explicit Opened(const char* path) : gpu((cuda::Load(), 0)) {
    std::ifstream file(path, std::ios::binary);
    const std::string binary{std::istreambuf_iterator<char>(file), {}};
    kernels = std::make_unique<KernelModule>(gpu, binary.data(), KernelNames().data(),
                                             KernelNames().size());
  }
  Gpu gpu;
  std::unique_ptr<KernelModule> kernels;
};

Opened& Open(const char* kernels) {
  static auto* const opened = new Opened(kernels);
  return *opened;
}

// A rank that is a stream of this process.
struct Rank {
  explicit Rank(const Gpu& gpu)
      : staging(gpu, KernelAllReduce::StagingBytes(kBuffer)),
        words(gpu, KernelAllReduce::kWordBytes),
        stream(gpu) {}
  DeviceMemory staging, words;
  DeviceStream stream;
  std::unique_ptr<KernelAllReduce> all_reduce;
};

template <typename Body>
const char* Said(Body body) {
  static thread_local std::string said;
  said.clear();
  try {
    body();
  } catch (const std::exception& error) { said = error.what(); }
  return said.c_str();
}

}  // namespace

// Reduces what several ranks have at these addresses, in place. Args: one_shot: how many bytes go
// so.
extern "C" const char* all_reduce(const char* kernels, uint32_t ranks, const cuda::Address* at,
                                  size_t bytes, int type, int op, size_t one_shot) {
  return Said([&] {
    Opened& opened = Open(kernels);
    std::vector<std::unique_ptr<Rank>> group;
    std::vector<KernelAllReduce::Shared> shared;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      group.push_back(std::make_unique<Rank>(opened.gpu));
      shared.push_back({group[rank]->staging.address(), group[rank]->words.address()});
    }
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      KernelAllReduce::Setup setup{&opened.gpu, opened.kernels.get(), rank, shared, kBuffer};
      setup.one_shot_bytes = one_shot;
      setup.timeout_seconds = kSeconds;
      group[rank]->all_reduce = std::make_unique<KernelAllReduce>(std::move(setup));
    }
    testing::NoGuard guard;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      group[rank]->all_reduce->Launch({{at[rank], at[rank], bytes}}, static_cast<DType>(type),
                                      static_cast<ReduceOp>(op), group[rank]->stream.get(), guard);
    }
    for (const auto& rank : group) rank->stream.Synchronize();
    for (const auto& rank : group) {
      if (rank->all_reduce->outcome() != device::Outcome::kRunning) {
        throw std::runtime_error("A rank has waited in vain.");
      }
    }
  });
}

// Encodes and decodes float32. Args: error: added before, and afterwards what was lost; 0 for none.
extern "C" const char* encode_and_decode(const char* kernels, int encoding, int bits,
                                         int stochastic, int euclidean, int unit, float clip,
                                         int block, cuda::Address in, cuda::Address error,
                                         cuda::Address out, size_t count, uint32_t seed) {
  return Said([&] {
    Opened& opened = Open(kernels);
    const Codec codec = MakeCodec(encoding, bits, stochastic, euclidean, unit, clip, block);
    const DeviceStream stream(opened.gpu);
    const DeviceMemory room(opened.gpu, KernelCodec::RoomBytes(count));
    const DeviceMemory encoded(opened.gpu, EncodedBytes(codec, count));
    const MappedMemory listed(opened.gpu, 3 * sizeof(device::Stretch));
    const DeviceMemory lists(opened.gpu, 3 * sizeof(device::Stretch));
    auto* const stretches = static_cast<device::Stretch*>(listed.data());
    size_t i = 0;
    for (const cuda::Address at : {in, error, out}) {
      stretches[i++] = {cuda::PointerTo<float>(at), 0};
    }
    stream.Copy(lists.address(), cuda::AddressOf(stretches), 3 * sizeof(device::Stretch));
    const auto place = [&](size_t number) {
      return device::Place{{cuda::PointerTo<const device::Stretch>(lists.address()) + number, 1},
                           0};
    };
    const KernelCodec codecs(*opened.kernels, stream.get());
    codecs.Encode({codec, count, count, seed, 0}, place(0), error ? place(1) : device::Place{},
                  room.address(), encoded.address());
    codecs.Decode(codec, count, encoded.address(), place(2), room.address());
    stream.Synchronize();
  });
}

}  // namespace tfdist
