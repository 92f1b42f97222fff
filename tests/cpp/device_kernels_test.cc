// The kernels of an all-reduce among GPUs, run on the processor: bit-identical to `Reduce`, over
// many rounds, and every wait ends.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpp/simulated_gpu.h"  // before the kernels

#include "cpp/ranks.h"
#include "cpp/values.h"
#include "device/kernels/all_reduce.cu"
#include "reduce/reduce.h"

namespace tfdist::testing {
namespace {

using namespace tfdist::device;

constexpr uint32_t kBlocks = 2, kThreads = 8;
constexpr uint64_t kNever = 600'000'000'000;

struct Kernels {
  void (*one_shot)(List, Staging, KernelBarrier, Waiting, double);
  void (*reduce)(uint64_t, Staging, Waiting, double);
};

std::map<std::string, Kernels> AllKernels() {
#define TFDIST_ENTRY(name, T, Op, S) {#name, {tfdist_one_shot_##name, tfdist_reduce_##name}},
  return {TFDIST_FOR_ALL_REDUCTIONS(TFDIST_ENTRY)};
}

// By the names that their launches use.
Kernels KernelsFor(DType type, ReduceOp op) {
  static const std::map<std::string, Kernels> all = AllKernels();
  if (type != DType::kBool) return all.at(std::string(NameOf(type)) + "_" + NameOf(op));
  const bool any = op == ReduceOp::kSum || op == ReduceOp::kMax;
  return all.at(any ? "uint8_max" : "uint8_min");
}

// One rank of a host: its memory, and a bucket of tensors.
class Rank {
 public:
  Rank(uint32_t rank, uint32_t ranks, const std::vector<size_t>& bytes)
      : words_(kBlocks * kMaxRanks) {
    barrier_.rank = staging_.rank = rank;
    barrier_.ranks = staging_.ranks = ranks;
    list_.count = static_cast<uint32_t>(bytes.size());
    for (size_t i = 0; i < bytes.size(); ++i) {
      // Every second tensor is unaligned.
      in.emplace_back(bytes[i] + 64);
      out.emplace_back(bytes[i] + 64);
      const size_t shift = i % 2;
      list_.spans[i] = {Aligned(in[i]) + shift, Aligned(out[i]) + shift, bytes[i], list_.vectors};
      list_.vectors += (bytes[i] + kVectorBytes - 1) / kVectorBytes;
    }
    for (auto& buffer : buffers_) buffer.resize(list_.vectors + 1);
    staging_.part = (list_.vectors + ranks - 1) / ranks;
  }

  void AllReduce(std::vector<Rank>& group, DType type, ReduceOp op, bool one_shot) {
    const Kernels kernels = KernelsFor(type, op);
    const double divisor = op == ReduceOp::kMean ? staging_.ranks : 1;
    for (uint32_t other = 0; other < staging_.ranks; ++other) {
      staging_.of[other] = reinterpret_cast<char*>(group[other].buffers_[turn_].data());
      barrier_.words[other] = group[other].words_.data();
    }
    turn_ = 1 - turn_;
    const Waiting waiting{&abort, &outcome, &ended, timeout};
    if (one_shot) {
      Launch(kernels.one_shot, kBlocks, kThreads, list_, staging_, Next(), waiting, divisor);
      return;
    }
    Launch(tfdist_pack, kBlocks, kThreads, list_, staging_, waiting);
    Launch(tfdist_barrier, 1, kThreads, Next(), waiting);
    Launch(kernels.reduce, kBlocks, kThreads, list_.vectors, staging_, waiting, divisor);
    if (before_second_barrier) before_second_barrier();
    Launch(tfdist_barrier, 1, kThreads, Next(), waiting);
    Launch(tfdist_unpack, kBlocks, kThreads, list_, staging_, waiting);
  }

  Outcome Ended() const { return static_cast<Outcome>(LoadWord(&outcome)); }
  const List& list() const { return list_; }

  std::vector<std::vector<char>> in, out;
  uint64_t abort = 0, outcome = 0, ended = 0;
  uint64_t timeout = kNever;
  std::function<void()> before_second_barrier;

 private:
  static char* Aligned(std::vector<char>& data) {
    return data.data() + (-reinterpret_cast<uint64_t>(data.data()) % kVectorBytes);
  }
  const KernelBarrier& Next() {
    barrier_.number = ++number_;
    return barrier_;
  }

  uint64_t number_ = 0;
  int turn_ = 0;
  List list_{};
  Staging staging_{};
  KernelBarrier barrier_{};
  std::vector<uint64_t> words_;
  std::vector<Vector> buffers_[2];
};

std::vector<Rank> MakeRanks(uint32_t ranks, const std::vector<size_t>& bytes) {
  std::vector<Rank> group;
  for (uint32_t rank = 0; rank < ranks; ++rank) group.emplace_back(rank, ranks, bytes);
  return group;
}

void OnEach(std::vector<Rank>& group, const std::function<void(Rank&)>& body) {
  std::vector<std::thread> threads;
  for (Rank& rank : group) threads.emplace_back([&] { body(rank); });
  for (std::thread& thread : threads) thread.join();
}

// Any bits, including NaNs.
void Fill(std::vector<Rank>& group, DType type, std::mt19937& random) {
  for (Rank& rank : group) {
    for (uint32_t i = 0; i < rank.list().count; ++i) {
      const Span& span = rank.list().spans[i];
      for (uint64_t at = 0; at < span.bytes; ++at) {
        const auto byte = static_cast<char>(type == DType::kBool ? random() % 2 : random());
        const_cast<char*>(span.in)[at] = byte;
        span.out[at] = 77;
      }
    }
  }
}

void Check(std::vector<Rank>& group, DType type, ReduceOp op) {
  for (uint32_t i = 0; i < group[0].list().count; ++i) {
    const size_t bytes = group[0].list().spans[i].bytes;
    // Copies, since the processor's code requires aligned values.
    std::vector<std::vector<uint64_t>> given(group.size(), std::vector<uint64_t>(bytes / 8 + 1));
    std::vector<const void*> in;
    for (size_t rank = 0; rank < group.size(); ++rank) {
      std::memcpy(given[rank].data(), group[rank].list().spans[i].in, bytes);
      in.push_back(given[rank].data());
    }
    std::vector<uint64_t> expected(bytes / 8 + 1);
    Reduction reduction{type,
                        op,
                        op == ReduceOp::kMean ? double(group.size()) : 1.0,
                        in.data(),
                        static_cast<int>(group.size()),
                        bytes / SizeOf(type),
                        expected.data()};
    Reduce(reduction);
    for (const Rank& rank : group) {
      for (size_t at = 0; at < bytes; at += SizeOf(type)) {
        EXPECT(AreEqual(type, rank.list().spans[i].out + at,
                        reinterpret_cast<const char*>(expected.data()) + at));
      }
      EXPECT(rank.Ended() == Outcome::kRunning);
    }
  }
}

void EveryReduction() {
  std::mt19937 random(1);
  for (int t = 0; t < kDTypes; ++t) {
    const auto type = static_cast<DType>(t);
    const size_t size = SizeOf(type);
    for (int o = 0; o < kReduceOps; ++o) {
      const auto op = static_cast<ReduceOp>(o);
      if (op == ReduceOp::kMean && !IsFloating(type)) continue;
      for (const uint32_t ranks : {2u, 3u}) {
        for (const bool one_shot : {true, false}) {
          std::vector<Rank> group = MakeRanks(ranks, {300 * size, 7 * size, 0, size, 64 * size, 0});
          Fill(group, type, random);
          OnEach(group, [&](Rank& rank) { rank.AllReduce(group, type, op, one_shot); });
          Check(group, type, op);
        }
      }
    }
  }
}

// Ranks proceed independently and reuse their buffers.
void ManyRounds() {
  std::mt19937 random(2);
  std::vector<Rank> group = MakeRanks(4, {60, 400});
  Fill(group, DType::kInt32, random);
  OnEach(group, [&](Rank& rank) {
    for (int round = 0; round < 20; ++round) {
      rank.AllReduce(group, DType::kInt32, ReduceOp::kSum, round % 3 > 0);
    }
  });
  Check(group, DType::kInt32, ReduceOp::kSum);
}

void ManyRanks() {
  std::mt19937 random(3);
  std::vector<Rank> group = MakeRanks(kThreads, {12});
  Fill(group, DType::kFloat32, random);
  OnEach(group, [&](Rank& rank) {
    rank.AllReduce(group, DType::kFloat32, ReduceOp::kSum, true);
    rank.AllReduce(group, DType::kFloat32, ReduceOp::kSum, false);
  });
  Check(group, DType::kFloat32, ReduceOp::kSum);
}

// Rank 1 does not arrive at a barrier; the host aborts the other ranks, or they time out.
void EveryWaitEnds() {
  for (const int barrier : {0, 1, 2}) {  // of one shot; the first and the second of two shots
    for (const bool told : {true, false}) {
      std::mt19937 random(4);
      std::vector<Rank> group = MakeRanks(3, {400});
      Fill(group, DType::kInt32, random);
      std::atomic<bool> away{false};
      const auto leave = [&](Rank& rank) {
        StoreWord(&rank.ended, 1);
        away = true;
      };
      OnEach(group, [&](Rank& rank) {
        const bool missing = &rank == &group[1];
        if (!missing && !told) rank.timeout = 20'000'000;
        if (missing && barrier == 2) rank.before_second_barrier = [&] { leave(rank); };
        if (missing && barrier != 2) leave(rank);
        std::thread host([&] {
          while (!away) std::this_thread::yield();
          if (told) StoreWord(&rank.abort, 1);
        });
        rank.AllReduce(group, DType::kInt32, ReduceOp::kSum, barrier == 0);
        host.join();
      });
      for (const Rank* rank : {&group[0], &group[2]}) {
        EXPECT(rank->Ended() == (told ? Outcome::kAborted : Outcome::kLate));
        EXPECT(rank->list().spans[0].out[0] == 77);  // nothing has been written
      }
    }
  }
}

}  // namespace
}  // namespace tfdist::testing

int main() {
  using namespace tfdist::testing;
  try {
    EveryReduction();
    ManyRounds();
    ManyRanks();
    EveryWaitEnds();
    std::printf("ok\n");
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return 1;
  }
}
