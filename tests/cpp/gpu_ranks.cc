#include "cpp/gpu_ranks.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iterator>
#include <thread>

#include "cpp/ranks.h"
#include "cpp/values.h"

namespace tfdist::testing {
namespace {

constexpr size_t kData = 1 << 16;

}  // namespace

std::string FakeDriver() {
  const char* const path = std::getenv("FAKE_CUDA");
  return path ? path : "";
}

std::string KernelBinary() {
  if (!FakeDriver().empty()) return "any";
  const char* const path = std::getenv("GPU_KERNELS");
  EXPECT(path);
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void FailDriver(const char* function, int status) {
  reinterpret_cast<void (*)(const char*, int)>(
      dlsym(dlopen(FakeDriver().c_str(), RTLD_NOW), "fake_fail"))(function, status);
}

std::string HeldByDriver() {
  return reinterpret_cast<const char* (*)()>(
      dlsym(dlopen(FakeDriver().c_str(), RTLD_NOW), "fake_held"))();
}

StreamWords::StreamWords()
    : words_(mmap(nullptr, StreamBarriers::kWordBytes, PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
  EXPECT(words_ != MAP_FAILED);
}

StreamWords::~StreamWords() { munmap(words_, StreamBarriers::kWordBytes); }

uint64_t* StreamWords::At(uint32_t owner, uint64_t barrier, uint32_t writer) const {
  return static_cast<uint64_t*>(words_) + owner * device::kBarrierWords +
         barrier % StreamBarriers::kMax * device::kMaxRanks + writer;
}

GpuRank::GpuRank()
    : gpu(0),
      kernels(gpu, KernelBinary().data(), KernelNames().data(), KernelNames().size()),
      staging(gpu, KernelAllReduce::StagingBytes(kGpuBuffer)),
      words(gpu, KernelAllReduce::kWordBytes),
      data(gpu, kData),
      stream(gpu) {}

void GpuRank::Join(uint32_t rank, std::vector<KernelAllReduce::Shared> ranks, double seconds,
                   const StreamWords* stream_words) {
  Upload(std::vector<char>(KernelAllReduce::kWordBytes), words.address());
  KernelAllReduce::Setup setup{&gpu, &kernels, rank, std::move(ranks), kGpuBuffer};
  setup.one_shot_bytes = kGpuOneShot;
  setup.timeout_seconds = seconds;
  all_reduce = nullptr;
  stream_barriers = nullptr;
  if (stream_words) {
    const auto count = static_cast<uint32_t>(setup.ranks.size());
    stream_barriers = std::make_unique<StreamBarriers>(gpu, stream_words->get(), rank, count);
  }
  setup.stream_barriers = stream_barriers.get();
  all_reduce = std::make_unique<KernelAllReduce>(std::move(setup));
}

void GpuRank::Upload(const std::vector<char>& values, cuda::Address to) {
  gpu.Use();
  cuda::Check(
      cuda::Load().cuMemcpyAsync(to, cuda::AddressOf(values.data()), values.size(), stream.get()),
      "cuMemcpyAsync");
  stream.Synchronize();
}

std::vector<char> GpuRank::Download(cuda::Address from, size_t bytes) {
  std::vector<char> values(bytes);
  gpu.Use();
  cuda::Check(cuda::Load().cuMemcpyAsync(cuda::AddressOf(values.data()), from, bytes, stream.get()),
              "cuMemcpyAsync");
  stream.Synchronize();
  return values;
}

std::vector<std::vector<char>> GpuRank::Reduce(DType type, ReduceOp op,
                                               const std::vector<std::vector<char>>& tensors) {
  std::vector<KernelAllReduce::Tensor> list;
  cuda::Address end = data.address();
  for (const std::vector<char>& values : tensors) {
    const cuda::Address at = (end + 15) / 16 * 16 + list.size() % 2;
    end = at + values.size();
    EXPECT(end <= data.address() + kData);
    if (!values.empty()) Upload(values, at);
    list.push_back({at, at, values.size()});
  }
  NoGuard guard;
  all_reduce->Launch(list, type, op, stream.get(), guard);
  stream.Synchronize();
  if (all_reduce->outcome() != device::Outcome::kRunning) return {};
  std::vector<std::vector<char>> results;
  for (const KernelAllReduce::Tensor& tensor : list) {
    results.push_back(tensor.bytes ? Download(tensor.out, tensor.bytes) : std::vector<char>());
  }
  return results;
}

bool GpuRank::Reduces(DType type, ReduceOp op, const std::vector<size_t>& counts, int rank,
                      int ranks) {
  std::vector<std::vector<char>> tensors, expected;
  for (const size_t count : counts) {
    tensors.push_back(Fill(type, count, rank));
    expected.push_back(Expected(type, op, ranks, count));
  }
  return Reduce(type, op, tensors) == expected &&
         all_reduce->outcome() == device::Outcome::kRunning;
}

GpuRanks MakeGpuRanks(uint32_t ranks, double seconds, const StreamWords* words) {
  GpuRanks group;
  std::vector<KernelAllReduce::Shared> shared;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    group.push_back(std::make_unique<GpuRank>());
    shared.push_back(group.back()->own());
  }
  for (uint32_t rank = 0; rank < ranks; ++rank) { group[rank]->Join(rank, shared, seconds, words); }
  return group;
}

void OnEachGpu(GpuRanks& group, const std::function<void(GpuRank&, int rank)>& body) {
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> failures(group.size());
  for (size_t rank = 0; rank < group.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(*group[rank], static_cast<int>(rank));
      } catch (...) { failures[rank] = std::current_exception(); }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace tfdist::testing
