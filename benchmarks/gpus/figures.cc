// Times the kernels of an all-reduce whose ranks share a GPU, and those of codecs, beside a copy of as
// many bytes, in turns.
// Prints one line of JSON for each figure. GPU_KERNELS is the file of the compiled kernels.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/gpu.h"
#include "device/host_staged.h"
#include "device/kernel_all_reduce.h"
#include "device/kernel_codec.h"
#include "device/kernel_names.h"
#include "product.h"
#include "timing.h"

namespace tfdist {
namespace {

using benchmark::Median;
using benchmark::Now;
using device::kVectorBytes;

constexpr size_t kLarge = size_t{64} << 20;
constexpr int kRounds = 15;

// Ends no wait.
struct Never : Guard {
  void Check() override {}
} never;

std::string Kernels() {
  const char* const path = std::getenv("GPU_KERNELS");
  if (!path) throw std::runtime_error("GPU_KERNELS names no file.");
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

template <typename T>
T* Pointer(cuda::Address address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// Something to time: what a stream is given.
struct Timed {
  std::string name;
  size_t bytes;  // that it reads and writes
  std::function<void()> launch;
};

// Medians of rounds, which follow one another.
void Compare(const DeviceStream& stream, const std::vector<Timed>& all, int times) {
  std::vector<std::vector<double>> seconds(all.size());
  for (int round = -1; round < kRounds; ++round) {
    for (size_t i = 0; i < all.size(); ++i) {
      const double start = Now();
      for (int n = 0; n < times; ++n) all[i].launch();
      stream.Synchronize();
      if (round >= 0) seconds[i].push_back((Now() - start) / times);
    }
  }
  for (size_t i = 0; i < all.size(); ++i) {
    std::printf("{\"figure\": \"%s\", \"bytes\": %zu, \"seconds\": %.9f}\n", all[i].name.c_str(),
                all[i].bytes, Median(seconds[i]));
  }
}

// Each kernel by itself, of a bucket of 64 MiB, with any number of blocks.
void Passes(const Gpu& gpu, const KernelModule& kernels) {
  constexpr uint64_t kVectors = kLarge / kVectorBytes;
  const DeviceStream stream(gpu);
  const DeviceMemory in(gpu, kLarge), out(gpu, kLarge), words(gpu, 64);
  const DeviceMemory first(gpu, kLarge), second(gpu, kLarge);
  const MappedMemory host(gpu, 16);
  const device::Waiting waiting{Pointer<uint64_t>(host.address()),
                                Pointer<uint64_t>(host.address()) + 1,
                                Pointer<uint64_t>(words.address()), 1'000'000'000};
  device::Staging staging{};
  staging.of[0] = Pointer<char>(first.address());
  staging.of[1] = Pointer<char>(second.address());
  staging.ranks = 2;
  staging.part = kVectors;  // as if this rank reduced all
  const auto listed = [&](uint32_t tensors) {
    device::List list{};
    list.count = tensors;
    list.vectors = kVectors;
    for (uint32_t i = 0; i < tensors; ++i) {
      const uint64_t begin = kVectors / tensors * i;
      list.spans[i] = {Pointer<char>(in.address()) + begin * kVectorBytes,
                       Pointer<char>(out.address()) + begin * kVectorBytes,
                       kLarge / tensors, begin};
    }
    return list;
  };
  std::vector<Timed> all{{"copy", 2 * kLarge, [&] {
                            cuda::Load().cuMemcpyAsync(out.address(), in.address(), kLarge,
                                                       stream.get());
                          }}};
  for (const unsigned blocks : {32u, 64u, 128u, 256u, 512u, 1024u}) {
    const std::string with = ", " + std::to_string(blocks) + " blocks";
    for (const uint32_t tensors : {1u, 64u}) {
      const device::List list = listed(tensors);
      const std::string of = " " + std::to_string(tensors) + with;
      all.push_back({"pack" + of, 2 * kLarge, [&, list, blocks] {
                       kernels.Launch("tfdist_pack", blocks, 512, stream.get(), list, staging,
                                      waiting);
                     }});
      all.push_back({"unpack" + of, 2 * kLarge, [&, list, blocks] {
                       kernels.Launch("tfdist_unpack", blocks, 512, stream.get(), list, staging,
                                      waiting);
                     }});
    }
    for (const char* const type : {"float32", "float16"}) {
      all.push_back({std::string("reduce 2 ") + type + with, 3 * kLarge, [&, type, blocks] {
                       kernels.Launch(std::string("tfdist_reduce_") + type + "_sum", blocks, 512,
                                      stream.get(), kVectors, staging, waiting, 1.0);
                     }});
    }
  }
  Compare(stream, all, 10);
}

// Encoding and decoding of float32, with and without error feedback; the bytes are all that is read and
// written.
void Codecs(const Gpu& gpu, const KernelModule& kernels) {
  constexpr size_t kValues = kLarge / sizeof(float);
  const DeviceStream stream(gpu);
  const DeviceMemory in(gpu, kLarge), error(gpu, kLarge), out(gpu, kLarge);
  const DeviceMemory room(gpu, KernelCodec::RoomBytes(kValues)), lists(gpu, 1024);
  const MappedMemory listed(gpu, 1024);
  auto* const stretches = static_cast<device::Stretch*>(listed.data());
  const DeviceMemory* const tensors[] = {&in, &error, &out};
  for (size_t i = 0; i < 3; ++i) stretches[i] = {Pointer<float>(tensors[i]->address()), 0};
  stream.Copy(lists.address(), reinterpret_cast<uintptr_t>(stretches), 1024);
  std::vector<float> values(kValues);
  for (size_t i = 0; i < kValues; ++i) values[i] = static_cast<float>(i * 2654435761u % 2001) - 1000;
  stream.Copy(in.address(), reinterpret_cast<uintptr_t>(values.data()), kLarge);
  stream.Synchronize();
  const auto place = [&](size_t i) {
    return device::Place{{Pointer<const device::Stretch>(lists.address()) + i, 1}, 0};
  };
  const KernelCodec codecs(kernels, stream.get());
  std::vector<Timed> all{
      {"copy", 2 * kLarge, [&] { stream.Copy(out.address(), in.address(), kLarge); }}};
  Codec int8, random, half, means;
  random.stochastic = true;
  half.form = Form::kHalf;
  means.form = Form::kTwoMeans;
  const std::pair<const char*, Codec> known[] = {
      {"int8", int8}, {"int8 at random", random}, {"half", half}, {"one bit", means}};
  const DeviceMemory encoded(gpu, kLarge);
  for (const auto& [name, codec] : known) {
    const size_t bytes = EncodedBytes(codec, kValues);
    const device::Batch batch{codec, kValues, kValues, 1, 0};
    for (const bool feeds_back : {false, true}) {
      const device::Place left = feeds_back ? place(1) : device::Place{};
      all.push_back({std::string("encode ") + name + (feeds_back ? " with error" : ""),
                     bytes + (feeds_back ? 3 : 1) * kLarge, [&, batch, left] {
                       codecs.Encode(batch, place(0), left, room.address(), encoded.address());
                     }});
    }
    all.push_back({std::string("decode ") + name, bytes + kLarge, [&, codec = codec] {
                     codecs.Decode(codec, kValues, encoded.address(), place(2), room.address());
                   }});
  }
  Compare(stream, all, 10);
}

// What passes through the host's memory, without what happens to it there: copies to and fro by
// themselves, and both at once in chunks.
void Staged(const std::shared_ptr<const Gpu>& shared) {
  const Gpu& gpu = *shared;
  const DeviceStream stream(gpu);
  const DeviceMemory memory(gpu, kLarge);
  const MappedMemory pinned(gpu, kLarge);
  HostStaged staged({shared}, never);
  const cuda::Address host = reinterpret_cast<uintptr_t>(pinned.data());
  const auto run = [&] {
    Operation operation;
    operation.fingerprint.kind = Kind::kAllReduce;
    operation.device = nullptr;
    operation.in = ConstPieces(Pointer<char>(memory.address()), kLarge);
    operation.out = Pieces(Pointer<char>(memory.address()), kLarge);
    staged.Run(operation, {&operation}, [](Operation&) {});
  };
  Compare(stream,
          {{"pinned copy to the host", kLarge, [&] { stream.Copy(host, memory.address(), kLarge); }},
           {"pinned copy to the GPU", kLarge, [&] { stream.Copy(memory.address(), host, kLarge); }},
           {"through the host, both ways", 2 * kLarge, run}},
          5);
}

// Whole all-reduces of float32 among ranks that are streams of this process.
void AllReduces(const Gpu& gpu, const KernelModule& kernels, uint32_t ranks) {
  struct Rank {
    explicit Rank(const Gpu& gpu)
        : staging(gpu, KernelAllReduce::StagingBytes(kLarge)),
          words(gpu, KernelAllReduce::kWordBytes),
          data(gpu, kLarge),
          stream(gpu) {}
    DeviceMemory staging, words, data;
    DeviceStream stream;
    std::unique_ptr<KernelAllReduce> all_reduce;
  };
  for (const bool one_shot : {true, false}) {
    std::vector<std::unique_ptr<Rank>> team;
    std::vector<KernelAllReduce::Shared> shared;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      team.push_back(std::make_unique<Rank>(gpu));
      shared.push_back({team[rank]->staging.address(), team[rank]->words.address()});
    }
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      KernelAllReduce::Setup setup{&gpu, &kernels, rank, shared, kLarge};
      setup.one_shot_bytes = one_shot ? kLarge : 0;
      setup.timeout_seconds = 2;
      team[rank]->all_reduce = std::make_unique<KernelAllReduce>(std::move(setup));
    }
    bool done = true;
    for (const size_t bytes : {size_t{1} << 10, size_t{8} << 10, size_t{64} << 10, size_t{1} << 18,
                               size_t{1} << 20, size_t{4} << 20, size_t{16} << 20, kLarge}) {
      // No more at once than fit into what the driver queues: to launch waits for that, and kernels
      // for each other's launches.
      constexpr int times = 16;
      std::vector<double> seconds;
      for (int round = -1; round < kRounds; ++round) {
        std::vector<std::thread> threads;
        std::atomic<uint32_t> ready{0};
        std::vector<double> each(ranks);
        for (uint32_t rank = 0; rank < ranks; ++rank) {
          threads.emplace_back([&, rank] {
            Rank& own = *team[rank];
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
      done = team[0]->all_reduce->outcome() == device::Outcome::kRunning;
      std::printf("{\"figure\": \"%s, %u streams\", \"bytes\": %zu, \"seconds\": %.9f%s}\n",
                  one_shot ? "one shot" : "two shots", ranks, bytes, Median(seconds),
                  done ? "" : ", \"failed\": true");
      if (!done) break;
    }
  }
}

// What stands for a matrix product, by itself, and beside kernels that wait for a rank which does
// not come: what they take of the multiprocessors.
void Waiting(const Gpu& gpu, const KernelModule& kernels) {
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
  for (int round = -1; round < kRounds; ++round) {
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
    std::printf("{\"figure\": \"%s\", \"bytes\": 0, \"seconds\": %.9f%s}\n", name,
                Median(seconds), all_wait ? "" : ", \"failed\": true");
  };
  print("product", alone);
  print("product beside a waiting one shot", one_shot);
  print("product beside waiting two shots", two_shots);
}

}  // namespace
}  // namespace tfdist

int main() {
  using namespace tfdist;
  std::setvbuf(stdout, nullptr, _IOLBF, 1 << 16);
  try {
    cuda::Load();
    const auto shared = std::make_shared<const Gpu>(0);
    const Gpu& gpu = *shared;
    const std::string binary = Kernels();
    const KernelModule kernels(gpu, binary.data(), KernelNames().data(), KernelNames().size());
    std::printf("{\"gpu\": \"%s\", \"architecture\": \"%s\", \"driver\": %d}\n", gpu.name().c_str(),
                gpu.architecture().c_str(), cuda::Load().version);
    Passes(gpu, kernels);
    Codecs(gpu, kernels);
    Staged(shared);
    Waiting(gpu, kernels);
    // With more on one GPU, a kernel may be queued behind another one that waits for it.
    AllReduces(gpu, kernels, 2);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
