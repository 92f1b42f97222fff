// All-reduces among GPUs that are threads: what is launched, in which order, how it ends.
// FAKE_CUDA is the path of the driver that stands for CUDA's.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "device/gpu.h"
#include "device/kernel_all_reduce.h"
#include "error.h"
#include "tests/team.h"
#include "tests/values.h"

namespace tfdist::testing {
namespace {

using device::Outcome;

constexpr size_t kBuffer = 4096;

std::string driver;

// A GPU with its kernels, and what other ranks reach of its memory.
struct Part {
  Part()
      : gpu(0),
        kernels(gpu, "any", KernelNames().data(), KernelNames().size()),
        staging(gpu, KernelAllReduce::StagingBytes(kBuffer)),
        words(gpu, KernelAllReduce::kWordBytes),
        stream(gpu) {}
  KernelAllReduce::Shared Own() const { return {staging.address(), words.address()}; }

  void Join(uint32_t rank, std::vector<KernelAllReduce::Shared> ranks, double seconds = 600) {
    KernelAllReduce::Setup setup{&gpu, &kernels, rank, std::move(ranks), kBuffer};
    setup.one_shot_bytes = 1024;
    setup.timeout_seconds = seconds;
    all_reduce = std::make_unique<KernelAllReduce>(std::move(setup));
  }

  // Reduces tensors of so many values, each of a rank's own, in place; returns whether all is right.
  bool Reduces(DType type, ReduceOp op, const std::vector<size_t>& counts, int rank, int ranks) {
    std::vector<std::unique_ptr<DeviceMemory>> memories;
    std::vector<KernelAllReduce::Tensor> tensors;
    for (const size_t count : counts) {
      const std::vector<char> values = Fill(type, count, rank);
      memories.push_back(std::make_unique<DeviceMemory>(gpu, values.size() + 16));
      const cuda::Address at = memories.back()->address();
      std::copy(values.begin(), values.end(), reinterpret_cast<char*>(at));
      tensors.push_back({at, at, values.size()});
    }
    all_reduce->Launch(tensors, type, op, stream.get());
    stream.Synchronize();
    if (all_reduce->outcome() != Outcome::kRunning) return false;
    for (size_t i = 0; i < counts.size(); ++i) {
      const std::vector<char> expected = Expected(type, op, ranks, counts[i]);
      const auto* found = reinterpret_cast<const char*>(tensors[i].in);
      if (!std::equal(expected.begin(), expected.end(), found)) return false;
    }
    return true;
  }

  Gpu gpu;
  KernelModule kernels;
  DeviceMemory staging, words;
  DeviceStream stream;
  std::unique_ptr<KernelAllReduce> all_reduce;
};

std::vector<std::unique_ptr<Part>> Team(uint32_t ranks, double seconds = 600) {
  std::vector<std::unique_ptr<Part>> team;
  std::vector<KernelAllReduce::Shared> shared;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    team.push_back(std::make_unique<Part>());
    shared.push_back(team.back()->Own());
  }
  for (uint32_t rank = 0; rank < ranks; ++rank) team[rank]->Join(rank, shared, seconds);
  return team;
}

void OnEach(std::vector<std::unique_ptr<Part>>& team,
            const std::function<void(Part&, int rank)>& body) {
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < team.size(); ++rank) {
    threads.emplace_back([&, rank] { body(*team[rank], static_cast<int>(rank)); });
  }
  for (std::thread& thread : threads) thread.join();
}

// Small ones in one shot, larger ones in two, and those that do not fit in pieces.
void Sizes() {
  std::vector<std::unique_ptr<Part>> team = Team(3);
  std::atomic<int> right{0};
  OnEach(team, [&](Part& part, int rank) {
    for (const auto& counts : std::vector<std::vector<size_t>>{
             {1}, {17, 3, 0, 5}, {600}, {5000, 7, 3000}, std::vector<size_t>(150, 9), {}}) {
      right += part.Reduces(DType::kFloat32, ReduceOp::kSum, counts, rank, 3);
      right += part.Reduces(DType::kBool, ReduceOp::kSum, counts, rank, 3);
      right += part.Reduces(DType::kFloat16, ReduceOp::kMean, counts, rank, 3);
    }
  });
  EXPECT(right == 3 * 6 * 3);
}

// What the stream is given before is done before, and what it is given later, later.
void Order() {
  std::vector<std::unique_ptr<Part>> team = Team(2);
  OnEach(team, [&](Part& part, int) {
    const DeviceMemory data(part.gpu, 2000), copy(part.gpu, 2000);
    DeviceStream before(part.gpu), behind(part.gpu);
    DeviceEvent filled(part.gpu), reduced(part.gpu), copied(part.gpu);
    EXPECT(filled.HasPassed());  // never recorded
    cuda::Load().cuMemsetD32Async(data.address(), 21, 500, before.get());
    filled.Record(before.get());
    filled.HoldBack(part.stream.get());
    part.all_reduce->Launch({{data.address(), data.address(), 2000}}, DType::kInt32,
                            ReduceOp::kSum, part.stream.get());
    reduced.Record(part.stream.get());
    reduced.HoldBack(behind.get());
    cuda::Load().cuMemcpyAsync(copy.address(), data.address(), 2000, behind.get());
    copied.Record(behind.get());
    behind.Synchronize();
    EXPECT(copied.HasPassed() && reduced.HasPassed());
    EXPECT(reinterpret_cast<const int*>(copy.address())[499] == 42);
  });
}

// Rank 1 launches nothing. The others are told, or find out; a new team works afterwards.
void Missing() {
  for (const bool told : {true, false}) {
    std::vector<std::unique_ptr<Part>> team = Team(3, told ? 600 : 0.05);
    OnEach(team, [&](Part& part, int rank) {
      if (rank == 1) return;
      std::thread host([&] {
        if (told) part.all_reduce->Abort();
      });
      EXPECT(!part.Reduces(DType::kInt32, ReduceOp::kSum, {700}, rank, 3));
      EXPECT(!part.Reduces(DType::kInt32, ReduceOp::kSum, {3}, rank, 3));
      EXPECT(part.all_reduce->outcome() == (told ? Outcome::kAborted : Outcome::kLate));
      host.join();
    });
    std::vector<KernelAllReduce::Shared> shared{team[0]->Own(), team[2]->Own()};
    for (const int rank : {0, 2}) {
      Part& part = *team[static_cast<size_t>(rank)];
      std::memset(reinterpret_cast<void*>(part.words.address()), 0, KernelAllReduce::kWordBytes);
    }
    for (const uint32_t rank : {0u, 1u}) team[rank * 2]->Join(rank, shared);
    OnEach(team, [&](Part& part, int rank) {
      if (rank != 1) EXPECT(part.Reduces(DType::kInt32, ReduceOp::kSum, {700}, rank / 2, 2));
    });
  }
}

void Say(int to, const cuda::IpcHandle& handle) {
  EXPECT(write(to, &handle, sizeof(handle)) == ssize_t{sizeof(handle)});
}
cuda::IpcHandle Hear(int from) {
  cuda::IpcHandle handle;
  EXPECT(read(from, &handle, sizeof(handle)) == ssize_t{sizeof(handle)});
  return handle;
}

// Two processes, each of which opens the other's memory; before this one has a driver.
void Processes() {
  int there[2], back[2], done[2];
  EXPECT(pipe(there) == 0 && pipe(back) == 0 && pipe(done) == 0);
  const auto run = [&](uint32_t rank, int out, int in) {
    cuda::Load(driver);
    Part part;
    Say(out, part.staging.Share());
    Say(out, part.words.Share());
    const PeerMemory staging(part.gpu, Hear(in)), words(part.gpu, Hear(in));
    std::vector<KernelAllReduce::Shared> shared(2);
    shared[rank] = part.Own();
    shared[1 - rank] = {staging.address(), words.address()};
    part.Join(rank, shared);
    for (int round = 0; round < 5; ++round) {
      EXPECT(part.Reduces(DType::kFloat32, ReduceOp::kMax, {3000, 5}, static_cast<int>(rank), 2));
    }
  };
  std::vector<pid_t> children;
  for (const uint32_t rank : {0u, 1u}) {
    children.push_back(fork());
    if (children.back() == 0) {
      try {
        run(rank, rank ? back[1] : there[1], rank ? there[0] : back[0]);
        _exit(0);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        _exit(1);
      }
    }
  }
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT(status == 0);
  }
}

std::string Refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// In a process of its own, since a process has one driver.
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
        cuda::Load(driver);
      },
      "is for CUDA 11.8. Install a driver for CUDA 12.0 or newer.");
}

void Errors() {
  const auto fail = reinterpret_cast<void (*)(const char*, int)>(
      dlsym(dlopen(driver.c_str(), RTLD_NOW), "fake_fail"));
  EXPECT(Refusal([] { Gpu gpu(2); }) ==
         "This process sees 2 GPUs, numbered from 0. Received: 2. CUDA_VISIBLE_DEVICES says which "
         "it sees.");
  const Gpu gpu(1);
  EXPECT(gpu.name() == "A GPU of threads" && gpu.architecture() == "sm_90");
  fail("cuMemAlloc_v2", 2);
  EXPECT(Refusal([&] { DeviceMemory(gpu, 8); }) ==
         "cuMemAlloc_v2 of the GPU's driver has failed: out of memory (CUDA_ERROR_OUT_OF_MEMORY).");
  fail("cuMemAlloc_v2", 0);
  const char* const unknown = "no_kernel";
  EXPECT(Refusal([&] { KernelModule(gpu, "any", &unknown, 1); }).find("cuModuleGetFunction") == 0);
  const DeviceMemory own(gpu, 8);
  EXPECT(Refusal([&] { PeerMemory(gpu, own.Share()); }).find("cuIpcOpenMemHandle_v2") == 0);
}

}  // namespace
}  // namespace tfdist::testing

int main() {
  using namespace tfdist::testing;
  driver = std::getenv("FAKE_CUDA");
  try {
    Drivers();
    Processes();
    tfdist::cuda::Load(driver);
    Errors();
    Sizes();
    Order();
    Missing();
    std::printf("ok\n");
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return 1;
  }
}
