// All-reduces among GPUs: their launches, order and failures. With FAKE_CUDA, the path of a fake
// driver, threads simulate a GPU; otherwise all ranks share a real one.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "cpp/gpu_ranks.h"
#include "cpp/ranks.h"
#include "cpp/values.h"
#include "device/gpu.h"
#include "device/kernel_launch.h"
#include "error.h"
#include "reduce/reduce.h"

namespace tfdist::testing {
namespace {

using device::Outcome;

// All ranks share a real GPU: with more than two, a kernel may be queued behind another one that
// waits for it.
int Ranks() { return FakeDriver().empty() ? 2 : 3; }

// Small tensors in one shot, larger ones in two, and those larger than the buffer in several lists.
void Sizes() {
  const int ranks = Ranks();
  GpuRanks group = MakeGpuRanks(static_cast<uint32_t>(ranks));
  std::atomic<int> right{0};
  OnEachGpu(group, [&](GpuRank& gpu, int rank) {
    for (const auto& counts : std::vector<std::vector<size_t>>{
             {1}, {17, 3, 0, 5}, {600}, {5000, 7, 3000}, std::vector<size_t>(150, 9), {}}) {
      right += gpu.Reduces(DType::kFloat32, ReduceOp::kSum, counts, rank, ranks);
      right += gpu.Reduces(DType::kBool, ReduceOp::kSum, counts, rank, ranks);
      right += gpu.Reduces(DType::kFloat16, ReduceOp::kMean, counts, rank, ranks);
    }
  });
  EXPECT(right == ranks * 6 * 3);
}

// Bit-identical to the processor, for any values.
void Bits() {
  const int ranks = Ranks();
  constexpr size_t kSmall = 40, kLarge = 1200;  // in one shot, and in two
  GpuRanks group = MakeGpuRanks(static_cast<uint32_t>(ranks));
  std::mt19937 random(1);
  for (int t = 0; t < kDTypes; ++t) {
    const auto type = static_cast<DType>(t);
    std::vector<std::vector<std::vector<char>>> given(static_cast<size_t>(ranks));
    for (auto& tensors : given) {
      for (const size_t count : {kSmall, kLarge}) {
        tensors.emplace_back(count * SizeOf(type));
        for (char& byte : tensors.back()) {
          byte = static_cast<char>(type == DType::kBool ? random() % 2 : random());
        }
      }
    }
    for (int o = 0; o < kReduceOps; ++o) {
      const auto op = static_cast<ReduceOp>(o);
      if (op == ReduceOp::kMean && !IsFloating(type)) continue;
      for (const size_t which : {0, 1}) {
        const size_t bytes = given[0][which].size();
        std::vector<const void*> in;
        for (const auto& tensors : given) in.push_back(tensors[which].data());
        std::vector<char> expected(bytes);
        tfdist::Reduce({type, op, op == ReduceOp::kMean ? ranks : 1.0, in.data(), ranks,
                        bytes / SizeOf(type), expected.data()});
        OnEachGpu(group, [&](GpuRank& gpu, int rank) {
          const auto found = gpu.Reduce(type, op, {given[static_cast<size_t>(rank)][which]});
          EXPECT(found.size() == 1);
          for (size_t at = 0; at < bytes; at += SizeOf(type)) {
            EXPECT(AreEqual(type, &found[0][at], &expected[at]));
          }
        });
      }
    }
  }
}

// Every kernel with a single rank, which waits for no other: a memory checker serializes kernels.
void Alone() {
  GpuRanks group = MakeGpuRanks(1);
  for (int t = 0; t < kDTypes; ++t) {
    for (int o = 0; o < kReduceOps; ++o) {
      const auto type = static_cast<DType>(t);
      const auto op = static_cast<ReduceOp>(o);
      if (op == ReduceOp::kMean && !IsFloating(type)) continue;
      EXPECT(group[0]->Reduces(type, op, {17, 3, 0, 5}, 0, 1));
      EXPECT(group[0]->Reduces(type, op, {1200, 7, 900}, 0, 1));
    }
  }
}

// Earlier work of the stream runs before, later work after.
void Order() {
  GpuRanks group = MakeGpuRanks(2);
  std::vector<std::unique_ptr<DeviceStream>> streams;
  for (int i = 0; i < 4; ++i) streams.push_back(std::make_unique<DeviceStream>(group[0]->gpu));
  OnEachGpu(group, [&](GpuRank& gpu, int rank) {
    const cuda::Address data = gpu.data.address(), copy = data + 4096;
    cuda::Stream* const before = streams[static_cast<size_t>(rank) * 2]->get();
    const DeviceStream& behind = *streams[static_cast<size_t>(rank) * 2 + 1];
    DeviceEvent filled(gpu.gpu), reduced(gpu.gpu), copied(gpu.gpu);
    EXPECT(filled.HasPassed());  // never recorded
    cuda::Load().cuMemsetD32Async(data, 21, 500, before);
    filled.Record(before);
    filled.HoldBack(gpu.stream.get());
    NoGuard guard;
    gpu.all_reduce->Launch({{data, data, 2000}}, DType::kInt32, ReduceOp::kSum, gpu.stream.get(),
                           guard);
    reduced.Record(gpu.stream.get());
    reduced.HoldBack(behind.get());
    cuda::Load().cuMemcpyAsync(copy, data, 2000, behind.get());
    copied.Record(behind.get());
    behind.Synchronize();
    EXPECT(copied.HasPassed() && reduced.HasPassed());
    int last = 0;
    std::memcpy(&last, gpu.Download(copy + 499 * sizeof(int), sizeof(int)).data(), sizeof(int));
    EXPECT(last == 42);
  });
}

// Rank 1 launches nothing. The other ranks are aborted, or time out; a new group works afterwards.
void Missing() {
  for (const bool told : {true, false}) {
    GpuRanks group = MakeGpuRanks(3, told ? 600 : 0.05);
    OnEachGpu(group, [&](GpuRank& gpu, int rank) {
      if (rank == 1) return;
      std::thread host([&] {
        if (told) gpu.all_reduce->Abort();
      });
      EXPECT(!gpu.Reduces(DType::kInt32, ReduceOp::kSum, {700}, rank, 3));
      EXPECT(!gpu.Reduces(DType::kInt32, ReduceOp::kSum, {3}, rank, 3));
      EXPECT(gpu.all_reduce->outcome() == (told ? Outcome::kAborted : Outcome::kLate));
      host.join();
    });
    group.erase(group.begin() + 1);
    const std::vector<KernelAllReduce::Shared> shared{group[0]->own(), group[1]->own()};
    for (const uint32_t rank : {0u, 1u}) group[rank]->Join(rank, shared);
    OnEachGpu(group, [&](GpuRank& gpu, int rank) {
      EXPECT(gpu.Reduces(DType::kInt32, ReduceOp::kSum, {700}, rank, 2));
    });
  }
}

std::string Refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) { return error.what(); }
  return "";
}

// In a separate process, since a process has one driver.
void IsRefused(const std::function<void()>& body, const std::string& part) {
  const pid_t child = fork();
  if (child == 0) {
    const std::string said = Refusal(body);
    if (said.find(part) == std::string::npos) std::fprintf(stderr, "said: %s\n", said.c_str());
    _exit(said.find(part) == std::string::npos);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT(status == 0);
}

void Drivers() {
  IsRefused([] { cuda::Load("/no/libcuda.so"); }, "there is no driver (/no/libcuda.so");
  IsRefused([] { cuda::Load("libdl.so.2"); }, "the driver libdl.so.2 lacks cuInit. Install");
  IsRefused(
      [] {
        setenv("FAKE_CUDA_VERSION", "11080", 1);
        cuda::Load(FakeDriver());
      },
      "is for CUDA 11.8. Install a driver for CUDA 12.0 or newer.");
}

void Errors() {
  EXPECT(Refusal([] { Gpu gpu(8); }) ==
         "This process sees 8 GPUs, numbered from 0. Received: 8. CUDA_VISIBLE_DEVICES selects the "
         "visible GPUs.");
  const Gpu gpu(1);
  EXPECT(gpu.name() == "A GPU of threads" && gpu.architecture() == "sm_90");
  FailDriver("cuMemAlloc_v2", 2);
  EXPECT(Refusal([&] { DeviceMemory(gpu, 8); }) ==
         "cuMemAlloc_v2 of the GPU's driver has failed: out of memory (CUDA_ERROR_OUT_OF_MEMORY).");
  FailDriver("cuMemAlloc_v2", 700);
  EXPECT(
      Refusal([&] { DeviceMemory(gpu, 8); }) ==
      "cuMemAlloc_v2 of the GPU's driver has failed: unknown error (CUDA_ERROR_UNKNOWN). Restart "
      "the process.");
  FailDriver("cuMemAlloc_v2", 0);
  const char* const unknown = "no_kernel";
  EXPECT(Refusal([&] { KernelModule(gpu, "any", &unknown, 1); }).find("cuModuleGetFunction") == 0);
  const DeviceMemory own(gpu, 8);
  EXPECT(Refusal([&] { PeerMemory(gpu, own.Share()); }).find("cuIpcOpenMemHandle_v2") == 0);
}

}  // namespace
}  // namespace tfdist::testing

// Args: "alone", or none for all other tests.
int main(int count, char** arguments) {
  using namespace tfdist::testing;
  const bool fake = !FakeDriver().empty();
  try {
    if (count > 1 && std::string(arguments[1]) == "alone") {
      tfdist::cuda::Load(FakeDriver());
      Alone();
      return 0;
    }
    if (fake) Drivers();
    tfdist::cuda::Load(FakeDriver());
    if (fake) Errors();
    if (fake) Alone();
    if (!fake) Bits();  // it would take minutes; `device_kernels_test` covers it
    Sizes();
    Order();
    Missing();
    std::printf("ok\n");
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return 1;
  }
}
