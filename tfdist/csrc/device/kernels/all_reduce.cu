// All-reduces data among the GPUs of a host.
//
// Small data are reduced in one shot: in a single kernel, each rank writes its values to its
// staging buffer, and then reduces the values of all ranks. Larger data are reduced in two shots:
// each rank reduces one part of the data, and then reads the reduced parts of the other ranks. This
// takes five kernels: pack, barrier, reduce, barrier, unpack. Sources: the one-shot and two-shot
// kernels of NCCL and TensorRT-LLM work in a similar way.
#include "device/kernels/barrier.h"
#include "device/kernels/execution.h"
#include "device/kernels/lists.h"
#include "device/kernels/reducing.h"
#include "device/kernels/staging.h"
#include "device/kernels/vectors.h"

namespace tfdist::device {

inline Vector* Vectors(char* data) { return reinterpret_cast<Vector*>(data); }

TFDIST_KERNEL tfdist_pack(List list, Staging staging, Waiting waiting) {
  if (HasGivenUp(waiting)) return;
  Vector* const own = Vectors(staging.of[staging.rank]);
  for (uint64_t v = ThreadOfGrid(); v < list.vectors; v += ThreadsOfGrid()) {
    own[v] = LoadVector(list, v);
  }
}

// Waits for the other ranks. Runs in one block. The host may abort at any time, so some threads may
// see the abort before others. All threads of the block therefore decide together whether to give
// up.
TFDIST_KERNEL tfdist_barrier(KernelBarrier barrier, Waiting waiting) {
  if (AllOfBlock(!HasGivenUp(waiting))) SyncRanks(barrier, waiting);
}

// Tells the other ranks that this rank has arrived at a barrier. This is the first half of the
// barrier if streams wait: in the second half, the stream waits for the other ranks. Runs in one
// block. A rank that has given up does not signal its arrival, because the other ranks would then
// treat its unfinished work as complete.
TFDIST_KERNEL tfdist_signal(KernelBarrier barrier, Waiting waiting) {
  if (!HasGivenUp(waiting) && IsOther(barrier, Thread())) Signal(barrier, Thread());
}

TFDIST_KERNEL tfdist_unpack(List list, Staging staging, Waiting waiting) {
  if (HasGivenUp(waiting)) return;
  for (uint64_t v = ThreadOfGrid(); v < list.vectors; v += ThreadsOfGrid()) {
    StoreVector(list, v, Vectors(staging.of[v / staging.part])[v]);
  }
}

// Reduces this rank's part, and writes the result over the part in this rank's staging buffer. No
// other rank reads this memory before the next barrier.
template <typename T, typename Op, typename S>
void ReducePart(uint64_t vectors, const Staging& staging, double divisor) {
  // The number of vectors that a thread reduces together. A larger number would need too many
  // registers.
  constexpr uint32_t kAtOnce = std::is_integral_v<T> ? 1 : 2;
  const uint64_t begin = staging.part * staging.rank;
  const uint64_t end = begin + staging.part < vectors ? begin + staging.part : vectors;
  Vector* const own = Vectors(staging.of[staging.rank]);
  const auto put = [&](uint64_t v, const Vector& result) { own[v] = result; };
  const uint64_t step = ThreadsOfGrid();
  uint64_t v = begin + ThreadOfGrid();
  for (; v + (kAtOnce - 1) * step < end; v += kAtOnce * step) {
    ReduceVectors<T, Op, S, kAtOnce>(staging.of, staging.ranks, v, step, divisor, put);
  }
  for (; v < end; v += step) {
    ReduceVectors<T, Op, S, 1>(staging.of, staging.ranks, v, step, divisor, put);
  }
}

// Reduces the values in one shot. Each block reduces its own part of the values, and synchronizes
// only with the blocks that have the same index on the other ranks. A block never waits for another
// block of the same rank, so the GPU need not run all blocks at the same time.
template <typename T, typename Op, typename S>
void InOneShot(const List& list, const Staging& staging, const KernelBarrier& barrier,
               const Waiting& waiting, double divisor) {
  const uint64_t share = (list.vectors + Blocks() - 1) / Blocks();
  const uint64_t begin = share * BlockIndex();
  const uint64_t end = begin + share < list.vectors ? begin + share : list.vectors;
  Vector* const own = Vectors(staging.of[staging.rank]);
  for (uint64_t v = begin + Thread(); v < end; v += ThreadsOfBlock()) {
    own[v] = LoadVector(list, v);
  }
  if (!SyncRanks(barrier, waiting)) return;
  const auto put = [&](uint64_t v, const Vector& result) { StoreVector(list, v, result); };
  for (uint64_t v = begin + Thread(); v < end; v += ThreadsOfBlock()) {
    ReduceVectors<T, Op, S, 1>(staging.of, staging.ranks, v, 0, divisor, put);
  }
}

#define TFDIST_REDUCE(name, T, Op, S)                                                     \
  TFDIST_KERNEL tfdist_reduce_##name(uint64_t vectors, Staging staging, Waiting waiting,  \
                                     double divisor) {                                    \
    if (!HasGivenUp(waiting)) ReducePart<T, Op, S>(vectors, staging, divisor);            \
  }                                                                                       \
  TFDIST_KERNEL tfdist_one_shot_##name(List list, Staging staging, KernelBarrier barrier, \
                                       Waiting waiting, double divisor) {                 \
    if (AllOfBlock(!HasGivenUp(waiting))) {                                               \
      InOneShot<T, Op, S>(list, staging, barrier, waiting, divisor);                      \
    }                                                                                     \
  }
TFDIST_FOR_ALL_REDUCTIONS(TFDIST_REDUCE)

}  // namespace tfdist::device
