// All-reduces among ranks that share a GPU, whose streams wait for each other: values, and every
// wait ends. On a real GPU, only one rank launches work, since streams of a process may be queued
// behind each other; see `device_processes_test.cc` for processes.
#include <dlfcn.h>

#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpp/calls.h"
#include "cpp/gpu_ranks.h"
#include "cpp/values.h"
#include "error.h"
#include "reduce/reduce.h"

namespace tfdist::testing {
namespace {

using device::Outcome;

constexpr size_t kListBytes = kGpuBuffer;  // bytes launched together

// The number of launches of the fake driver.
int Launches() {
  if (FakeDriver().empty()) return 0;
  return reinterpret_cast<int (*)()>(
      dlsym(dlopen(FakeDriver().c_str(), RTLD_NOW), "fake_launches"))();
}

// Many rounds, of one list and of several.
void Values(uint32_t ranks) {
  const StreamWords words;
  GpuRanks group = MakeGpuRanks(ranks, 600, &words);
  OnEachGpu(group, [&](GpuRank& gpu, int rank) {
    const auto reduces = [&](DType type, ReduceOp op, const std::vector<size_t>& counts) {
      EXPECT(gpu.Reduces(type, op, counts, rank, static_cast<int>(ranks)));
    };
    for (const auto& counts : std::vector<std::vector<size_t>>{{1}, {17, 3, 0, 5}, {5000, 7}, {}}) {
      reduces(DType::kFloat32, ReduceOp::kSum, counts);
      reduces(DType::kBool, ReduceOp::kSum, counts);
      reduces(DType::kFloat16, ReduceOp::kMean, counts);
      reduces(DType::kInt64, ReduceOp::kMax, counts);
    }
    for (int round = 0; round < 40; ++round) reduces(DType::kInt32, ReduceOp::kSum, {40});
  });
}

// Bit-identical to the processor, for any values.
void Bits() {
  constexpr int kRanks = 3;
  constexpr size_t kBytes = 3 * kListBytes / 2;
  const StreamWords words;
  GpuRanks group = MakeGpuRanks(kRanks, 600, &words);
  std::mt19937 random(1);
  std::vector<std::vector<char>> given(kRanks, std::vector<char>(kBytes));
  for (auto& values : given) {
    for (char& byte : values) byte = static_cast<char>(random());
  }
  for (const auto& [type, op] :
       {std::pair(DType::kFloat32, ReduceOp::kMean), std::pair(DType::kBfloat16, ReduceOp::kSum),
        std::pair(DType::kFloat64, ReduceOp::kMin), std::pair(DType::kUint8, ReduceOp::kProduct)}) {
    std::vector<const void*> in;
    for (const auto& values : given) in.push_back(values.data());
    std::vector<char> expected(kBytes);
    tfdist::Reduce({type, op, op == ReduceOp::kMean ? kRanks : 1.0, in.data(), kRanks,
                    kBytes / SizeOf(type), expected.data()});
    OnEachGpu(group, [&, type = type, op = op](GpuRank& gpu, int rank) {
      const auto found = gpu.Reduce(type, op, {given[static_cast<size_t>(rank)]});
      EXPECT(found.size() == 1);
      for (size_t at = 0; at < kBytes; at += SizeOf(type)) {
        EXPECT(AreEqual(type, &found[0][at], &expected[at]));
      }
    });
  }
}

// Rank 0, and the words of a simulated rank 1, whose values are zero.
struct Pair {
  explicit Pair(double seconds = 600) : group(MakeGpuRanks(2, seconds, &words)) {}
  GpuRank& gpu() { return *group[0]; }
  void Launch(size_t lists, Guard& guard) {
    const cuda::Address data = gpu().data.address();
    gpu().all_reduce->Launch({{data, data, lists * kListBytes}}, DType::kInt32, ReduceOp::kSum,
                             gpu().stream.get(), guard);
  }
  // Rank 1 arrives at barriers.
  void Arrive(uint64_t first, uint64_t last) {
    for (uint64_t barrier = first; barrier <= last; ++barrier) {
      __atomic_store_n(words.At(0, barrier, 1), barrier, __ATOMIC_RELEASE);
    }
  }
  bool HasSignaled(uint64_t barrier) {
    return __atomic_load_n(words.At(1, barrier, 0), __ATOMIC_ACQUIRE) == barrier;
  }

  const StreamWords words;
  GpuRanks group;
};

// Aborts at each wait of three lists. Later work is neither done nor signaled, and the end of the
// waits is final, regardless of late writes by the other rank.
void EachWait() {
  constexpr size_t kLists = 3;
  constexpr uint64_t kBarriers = 2 * kLists;
  for (uint64_t missed = 1; missed <= kBarriers; ++missed) {
    NoGuard guard;
    Pair pair;
    const std::vector<char> given(kLists * kListBytes, 1);
    pair.gpu().Upload(given, pair.gpu().data.address());
    pair.Arrive(1, missed - 1);
    pair.Launch(kLists, guard);
    while (!pair.HasSignaled(missed)) std::this_thread::yield();
    EXPECT(pair.gpu().all_reduce->outcome() == Outcome::kRunning);
    pair.gpu().all_reduce->Abort();
    pair.Arrive(missed, kBarriers);
    pair.gpu().stream.Synchronize();
    EXPECT(pair.gpu().all_reduce->outcome() == Outcome::kAborted);
    for (uint64_t later = missed + 1; later <= kBarriers; ++later) EXPECT(!pair.HasSignaled(later));
    // Rank 1's half of a list holds its zeros.
    const std::vector<char> found = pair.gpu().Download(pair.gpu().data.address(), given.size());
    for (size_t list = 0; list < kLists; ++list) {
      const bool done = 2 * (list + 1) < missed;
      EXPECT(found[list * kListBytes] == 1 && found[(list + 1) * kListBytes - 1] == (done ? 0 : 1));
    }
    const int launches = Launches();
    pair.Launch(kLists, guard);
    pair.gpu().stream.Synchronize();
    EXPECT(Launches() == launches);
  }
}

// All pending waits end at once, although the other rank writes numbers smaller than the final one.
void LateNumbers() {
  Pair pair;
  StreamBarriers& stream_barriers = *pair.gpu().stream_barriers;
  stream_barriers.Release();
  pair.Arrive(1, 2);
  for (uint64_t barrier = 1; barrier <= StreamBarriers::kMax; ++barrier) {
    stream_barriers.Await(barrier, pair.gpu().stream.get());
  }
  pair.gpu().stream.Synchronize();
}

// More lists than may be pending, while the other rank does not arrive: the host waits, rather than
// a driver's full queue, until its guard or the timeout ends the wait.
void Room() {
  struct Impatience : Guard {
    void Check() override {
      if (++looks == 100) throw Error(Code::kUnavailable, "lost");
    }
    int looks = 0;
  } impatience;
  constexpr size_t kLists = 15, kKernels = 5;
  const auto launch = [](Pair& pair, Guard& guard, const std::string& part) {
    const int before = Launches();
    ExpectError([&] { pair.Launch(kLists, guard); }, Code::kUnavailable, {part});
    EXPECT(Launches() - before <= static_cast<int>(8 * kKernels));
    pair.gpu().all_reduce->Abort();
    pair.gpu().stream.Synchronize();
  };
  Pair pair;
  launch(pair, impatience, "lost");
  NoGuard patience;
  Pair late(0.05);
  launch(late, patience, "TFDIST_COLLECTIVE_TIMEOUT");
  // If the other rank arrives, there is always room again.
  Pair good;
  std::thread other([&] {
    for (uint64_t barrier = 1; barrier <= 2 * kLists; ++barrier) {
      while (!good.HasSignaled(barrier)) std::this_thread::yield();
      good.Arrive(barrier, barrier);
    }
  });
  good.Launch(kLists, patience);
  good.gpu().stream.Synchronize();
  other.join();
  EXPECT(good.gpu().all_reduce->outcome() == Outcome::kRunning);
}

}  // namespace
}  // namespace tfdist::testing

int main() {
  using namespace tfdist::testing;
  return Report([] {
    tfdist::cuda::Load(FakeDriver());
    if (!FakeDriver().empty()) {
      for (const uint32_t ranks : {1u, 2u, 3u, 4u}) Values(ranks);
      Bits();
    }
    EachWait();
    LateNumbers();
    Room();
  });
}
