// An all-reduce among the GPUs of a host.
//
// In one shot, which is for small data, a single kernel does all the work: each rank writes its
// values to its staging buffer, and then reduces the values of all ranks. In two shots, each rank
// reduces a part of the data, and the other ranks fetch the result. This takes five kernels: pack,
// barrier, reduce, barrier, unpack. Sources: the kernels with the same names in NCCL and
// TensorRT-LLM work in a similar way.
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

// Runs in one block. Its threads decide together whether to give up, since the host may abort at
// any time.
TFDIST_KERNEL tfdist_barrier(KernelBarrier barrier, Waiting waiting) {
  if (AllOfBlock(!HasGivenUp(waiting))) SyncRanks(barrier, waiting);
}

// The first half of a barrier if streams wait. Runs in one block. A rank that has given up does not
// signal, because the other ranks would treat its unfinished work as complete.
TFDIST_KERNEL tfdist_signal(KernelBarrier barrier, Waiting waiting) {
  if (!HasGivenUp(waiting) && IsOther(barrier, Thread())) Signal(barrier, Thread());
}

TFDIST_KERNEL tfdist_unpack(List list, Staging staging, Waiting waiting) {
  if (HasGivenUp(waiting)) return;
  for (uint64_t v = ThreadOfGrid(); v < list.vectors; v += ThreadsOfGrid()) {
    StoreVector(list, v, Vectors(staging.of[v / staging.part])[v]);
  }
}

// Reduces this rank's part in place. This is safe, because no other rank reads the part before the
// next barrier.
template <typename T, typename Op, typename S>
void ReducePart(uint64_t vectors, const Staging& staging, double divisor) {
  constexpr uint32_t kAtOnce = std::is_integral_v<T> ? 1 : 2;  // limited by the number of registers
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

// Each block reduces its own part of the values. It synchronizes only with the blocks that have the
// same index on the other ranks. So it does not matter whether the other blocks of this rank are
// running.
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
