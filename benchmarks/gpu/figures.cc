// Measures one GPU: all-reduces between ranks that share the GPU, the kernels of all-reduces and
// codecs, and copies with which they are compared. Prints one line of JSON for each figure.
//
//     figures ROUNDS BYTES [PART...]
//
// BYTES is the size of a large tensor. By default, the program measures all parts. The environment
// variables GPU_KERNELS and PRODUCT_KERNEL are the paths of the compiled kernels, and
// TFDIST_CUDA_LIBRARY is the path of the driver.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comparing.h"
#include "device/gpu.h"
#include "device/host_staged.h"
#include "device/kernel_launch.h"
#include "messages.h"
#include "product.h"
#include "timing.h"

namespace tfdist {
namespace {

using benchmark::Compare;
using benchmark::Extent;
using benchmark::Median;
using benchmark::Now;
using benchmark::Print;
using benchmark::Timed;
using device::kVectorBytes;

constexpr const char* kCopy = "copy";

// A guard that never ends a wait early.
struct Never : Guard {
  void Check() override {}
} never;

std::string KernelFile() {
  const char* const path = std::getenv("GPU_KERNELS");
  if (!path) throw std::runtime_error("GPU_KERNELS names no file.");
  return path;
}

std::string Kernels() {
  std::ifstream file(KernelFile(), std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

template <typename T>
T* Pointer(cuda::Address address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// Measures each kernel of an all-reduce separately, for a large bucket and several numbers of
// blocks.
void Passes(const Gpu& gpu, const KernelModule& kernels, const Extent& extent) {
  const size_t large = extent.bytes;
  const uint64_t vectors = large / kVectorBytes;
  const DeviceStream stream(gpu);
  const DeviceMemory in(gpu, large), out(gpu, large), words(gpu, 64);
  const DeviceMemory first(gpu, large), second(gpu, large);
  const MappedMemory host(gpu, 16);
  const device::Waiting waiting{Pointer<uint64_t>(host.address()),
                                Pointer<uint64_t>(host.address()) + 1,
                                Pointer<uint64_t>(words.address()), 1'000'000'000};
  device::Staging staging{};
  staging.of[0] = Pointer<char>(first.address());
  staging.of[1] = Pointer<char>(second.address());
  staging.ranks = 2;
  staging.part = vectors;  // This rank reduces the whole bucket.
  const auto listed = [&](uint32_t tensors) {
    device::List list{};
    list.count = tensors;
    list.vectors = vectors;
    for (uint32_t i = 0; i < tensors; ++i) {
      const uint64_t begin = vectors / tensors * i;
      list.spans[i] = {Pointer<char>(in.address()) + begin * kVectorBytes,
                       Pointer<char>(out.address()) + begin * kVectorBytes, large / tensors, begin};
    }
    return list;
  };
  std::vector<Timed> all{
      {{kCopy, 2 * large}, [&] { stream.Copy(out.address(), in.address(), large); }}};
  for (const unsigned blocks : {32u, 64u, 128u, 256u, 512u, 1024u}) {
    const std::string with = ", " + std::to_string(blocks) + " blocks";
    for (const uint32_t tensors : {1u, 64u}) {
      const device::List list = listed(tensors);
      const std::string of = " " + std::to_string(tensors) + with;
      all.push_back({{"pack" + of, 2 * large, kCopy}, [&, list, blocks] {
                       kernels.Launch("tfdist_pack", blocks, 512, stream.get(), list, staging,
                                      waiting);
                     }});
      all.push_back({{"unpack" + of, 2 * large, kCopy}, [&, list, blocks] {
                       kernels.Launch("tfdist_unpack", blocks, 512, stream.get(), list, staging,
                                      waiting);
                     }});
    }
    for (const char* const type : {"float32", "float16"}) {
      const std::string name = std::string("reduce 2 ") + type + with;
      all.push_back({{name, 3 * large, kCopy}, [&, type, blocks] {
                       kernels.Launch(std::string("tfdist_reduce_") + type + "_sum", blocks, 512,
                                      stream.get(), vectors, staging, waiting, 1.0);
                     }});
    }
  }
  Compare(stream, all, extent.rounds, 10);
}

// Measures the encoding and decoding of float32 tensors, with and without error feedback. The bytes
// of a figure are all bytes that the kernels read and write.
void Codecs(const Gpu& gpu, const KernelModule& kernels, const Extent& extent) {
  constexpr const char* kReference = "copy beside codecs";
  const size_t large = extent.bytes, count = large / sizeof(float);
  const DeviceStream stream(gpu);
  const DeviceMemory in(gpu, large), error(gpu, large), out(gpu, large);
  const DeviceMemory room(gpu, KernelCodec::RoomBytes(count)), lists(gpu, 1024);
  const MappedMemory listed(gpu, 1024);
  auto* const stretches = static_cast<device::Stretch*>(listed.data());
  const DeviceMemory* const tensors[] = {&in, &error, &out};
  for (size_t i = 0; i < 3; ++i) stretches[i] = {Pointer<float>(tensors[i]->address()), 0};
  stream.Copy(lists.address(), reinterpret_cast<uintptr_t>(stretches), 1024);
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i * 2654435761u % 2001) - 1000;
  stream.Copy(in.address(), reinterpret_cast<uintptr_t>(values.data()), large);
  stream.Synchronize();
  const auto place = [&](size_t i) {
    return device::Place{{Pointer<const device::Stretch>(lists.address()) + i, 1}, 0};
  };
  const KernelCodec codecs(kernels, stream.get());
  std::vector<Timed> all{
      {{kReference, 2 * large}, [&] { stream.Copy(out.address(), in.address(), large); }}};
  Codec int8, random, half, means;
  random.stochastic = true;
  half.encoding = Encoding::kHalf;
  means.encoding = Encoding::kTwoMeans;
  const std::pair<const char*, Codec> known[] = {
      {"int8", int8}, {"int8 at random", random}, {"half", half}, {"one bit", means}};
  const DeviceMemory encoded(gpu, large);
  for (const auto& [name, codec] : known) {
    const size_t bytes = EncodedBytes(codec, count);
    const device::Batch batch{codec, count, count, 1, 0};
    for (const bool feeds_back : {false, true}) {
      const device::Place left = feeds_back ? place(1) : device::Place{};
      all.push_back({{std::string("encode ") + name + (feeds_back ? " with error" : ""),
                      bytes + (feeds_back ? 3 : 1) * large, kReference},
                     [&, batch, left] {
                       codecs.Encode(batch, place(0), left, room.address(), encoded.address());
                     }});
    }
    const std::string decode = std::string("decode ") + name;
    all.push_back({{decode, bytes + large, kReference}, [&, codec = codec] {
                     codecs.Decode(codec, count, encoded.address(), place(2), room.address());
                   }});
  }
  Compare(stream, all, extent.rounds, 10);
}

// Measures the copies of an all-reduce through the host's memory, without the reduction: first the
// copies to the host and the copies to the GPU separately, then both together in chunks.
void Staged(const std::shared_ptr<const Gpu>& shared, const Extent& extent) {
  constexpr const char* kToHost = "pinned copy to the host";
  const size_t large = extent.bytes;
  const Gpu& gpu = *shared;
  const DeviceStream stream(gpu);
  const DeviceMemory memory(gpu, large);
  const MappedMemory pinned(gpu, large);
  HostStaged staged({shared}, never);
  const cuda::Address host = reinterpret_cast<uintptr_t>(pinned.data());
  const auto run = [&] {
    Operation operation;
    operation.fingerprint.kind = Kind::kAllReduce;
    operation.device = nullptr;
    operation.in = ConstBufferList(Pointer<char>(memory.address()), large);
    operation.out = BufferList(Pointer<char>(memory.address()), large);
    staged.Run(operation, {&operation}, [](Operation&) {});
  };
  Compare(stream,
          {{{kToHost, large}, [&] { stream.Copy(host, memory.address(), large); }},
           {{"pinned copy to the GPU", large}, [&] { stream.Copy(memory.address(), host, large); }},
           {{"through the host and back", large, kToHost}, run}},
          extent.rounds, 5);
}

// Measures complete float32 all-reduces between ranks that are streams of this process.
void AllReduces(const Gpu& gpu, const KernelModule& kernels, uint32_t ranks, const Extent& extent) {
  const size_t large = extent.bytes;
  struct Rank {
    Rank(const Gpu& gpu, size_t large)
        : staging(gpu, KernelAllReduce::StagingBytes(large)),
          words(gpu, KernelAllReduce::kWordBytes),
          data(gpu, large),
          stream(gpu) {}
    DeviceMemory staging, words, data;
    DeviceStream stream;
    std::unique_ptr<KernelAllReduce> all_reduce;
  };
  for (const bool one_shot : {true, false}) {
    std::vector<std::unique_ptr<Rank>> group;
    std::vector<KernelAllReduce::Shared> shared;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      group.push_back(std::make_unique<Rank>(gpu, large));
      shared.push_back({group[rank]->staging.address(), group[rank]->words.address()});
    }
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      KernelAllReduce::Setup setup{&gpu, &kernels, rank, shared, large};
      setup.one_shot_bytes = one_shot ? large : 0;
      setup.timeout_seconds = 2;
      group[rank]->all_reduce = std::make_unique<KernelAllReduce>(std::move(setup));
    }
    bool done = true;
    for (const size_t bytes : {size_t{1} << 10, size_t{8} << 10, size_t{64} << 10, size_t{1} << 18,
                               size_t{1} << 20, size_t{4} << 20, size_t{16} << 20, large}) {
      if (bytes > large) continue;
      // The launches of a round must fit into the driver's queue. If the queue is full, a launch
      // waits for a kernel. But the kernel may wait for another rank's kernel, which could then not
      // be launched.
      constexpr int times = 16;
      std::vector<double> seconds;
      for (int round = -1; round < extent.rounds; ++round) {
        std::vector<std::thread> threads;
        std::atomic<uint32_t> ready{0};
        std::vector<double> each(ranks);
        for (uint32_t rank = 0; rank < ranks; ++rank) {
          threads.emplace_back([&, rank] {
            Rank& own = *group[rank];
            const cuda::Address data = own.data.address();
            gpu.Use();
            ++ready;
            while (ready < ranks) std::this_thread::yield();
            const double start = Now();
            for (int n = 0; n < times; ++n) {
              own.all_reduce->Launch({{data, data, bytes}}, DType::kFloat32, ReduceOp::kSum,
                                     own.stream.get(), never);
            }
            own.stream.Synchronize();
            each[rank] = (Now() - start) / times;
          });
        }
        for (std::thread& thread : threads) thread.join();
        if (round >= 0) seconds.push_back(*std::max_element(each.begin(), each.end()));
      }
      done = group[0]->all_reduce->outcome() == device::Outcome::kRunning;
      // Each rank first copies its tensor to its staging buffer. With one shot, each rank then
      // reads the staging buffers of all ranks, and writes the whole sum. With two shots, each rank
      // does this for a part of the tensor. Then each rank reads the parts of all ranks, and writes
      // the whole sum.
      const size_t moved = one_shot ? ranks * (ranks + 3) : ranks * 4 + ranks + 1;
      const std::string of = std::to_string(bytes >> 10) + " KiB, " + std::to_string(ranks);
      Print({(one_shot ? "one shot of " : "two shots of ") + of + " streams", moved * bytes, kCopy},
            Median(seconds), !done);
      if (!done) break;
    }
  }
}

// Measures the product kernel alone, and then together with the kernel of an all-reduce. The other
// rank of the all-reduce never takes part, so this kernel only waits. The difference shows how much
// of the GPU a waiting kernel uses.
void Waiting(const Gpu& gpu, const KernelModule& kernels, const Extent& extent) {
  constexpr size_t kBytes = size_t{1} << 20;
  benchmark::Product product(gpu);
  const DeviceMemory data(gpu, kBytes), staging(gpu, KernelAllReduce::StagingBytes(kBytes));
  const DeviceMemory words(gpu, KernelAllReduce::kWordBytes);
  const DeviceMemory staging_of_other(gpu, KernelAllReduce::StagingBytes(kBytes));
  const DeviceMemory words_of_other(gpu, KernelAllReduce::kWordBytes);
  const DeviceStream stream(gpu);
  const auto beside = [&](bool one_shot) {
    KernelAllReduce::Setup setup{&gpu, &kernels, 0, {}, kBytes};
    setup.ranks = {{staging.address(), words.address()},
                   {staging_of_other.address(), words_of_other.address()}};
    setup.one_shot_bytes = one_shot ? kBytes : 0;
    setup.timeout_seconds = 10;
    KernelAllReduce all_reduce(std::move(setup));
    all_reduce.Launch({{data.address(), data.address(), kBytes}}, DType::kFloat32, ReduceOp::kSum,
                      stream.get(), never);
    const double seconds = product.Time();
    const bool waits = all_reduce.outcome() == device::Outcome::kRunning;
    all_reduce.Abort();
    stream.Synchronize();
    return std::pair(seconds, waits);
  };
  std::vector<double> alone, one_shot, two_shots;
  bool all_wait = true;
  for (int round = -1; round < extent.rounds; ++round) {
    const double without = product.Time();
    const auto [one, waits_in_one] = beside(true);
    const auto [two, waits_in_two] = beside(false);
    all_wait = all_wait && waits_in_one && waits_in_two;
    if (round < 0) continue;
    alone.push_back(without);
    one_shot.push_back(one);
    two_shots.push_back(two);
  }
  const auto print = [&](const char* name, const std::vector<double>& seconds) {
    Print({name, 0, "product"}, Median(seconds), !all_wait);
  };
  print("product", alone);
  print("product beside a waiting one shot", one_shot);
  print("product beside waiting two shots", two_shots);
}

}  // namespace
}  // namespace tfdist

int main(int argc, char** argv) {
  using namespace tfdist;
  std::setvbuf(stdout, nullptr, _IOLBF, 1 << 16);
  try {
    if (argc < 3) throw std::runtime_error("figures ROUNDS BYTES [PART...]");
    const Extent extent{std::atoi(argv[1]), std::strtoull(argv[2], nullptr, 10)};
    const std::set<std::string> parts(argv + 3, argv + argc);
    const auto wants = [&](const char* part) { return parts.empty() || parts.count(part); };
    const char* const driver = std::getenv("TFDIST_CUDA_LIBRARY");
    cuda::Load(driver ? driver : "");
    const auto shared = std::make_shared<const Gpu>(0);
    const Gpu& gpu = *shared;
    const std::string binary = Kernels();
    const KernelModule kernels(gpu, binary.data(), KernelNames().data(), KernelNames().size());
    std::printf("{\"gpu\": \"%s\", \"architecture\": \"%s\", \"driver\": %d}\n", gpu.name().c_str(),
                gpu.architecture().c_str(), cuda::Load().version);
    if (wants("passes")) Passes(gpu, kernels, extent);
    if (wants("codecs")) Codecs(gpu, kernels, extent);
    if (wants("staged")) Staged(shared, extent);
    if (wants("messages")) benchmark::MeasureMessages(extent, KernelFile());
    if (wants("waiting")) Waiting(gpu, kernels, extent);
    // With more than two ranks on one GPU, a kernel may be queued behind a kernel that waits for
    // it.
    if (wants("all_reduces")) AllReduces(gpu, kernels, 2, extent);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
