// An all-reduce among the GPUs of a host.
//
// In one shot, each rank puts its values where the others read them, and reduces all of them: for
// small ones, one kernel. In two shots, each reduces a part, and the others fetch it: pack, meet,
// reduce, meet, unpack. Sources: NCCL's and TensorRT-LLM's kernels of these names work alike.
#include "device/kernels/execution.h"
#include "device/kernels/lists.h"
#include "device/kernels/meeting.h"
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

// One block, whose threads go together: the host may give up at any time.
TFDIST_KERNEL tfdist_meet(Meeting meeting, Waiting waiting) {
  if (AllOfBlock(!HasGivenUp(waiting))) Meet(meeting, waiting);
}

// The first half of a meeting of streams, one block. A rank that has given up does not come: the
// others would take what it has not done for done.
TFDIST_KERNEL tfdist_tell(Meeting meeting, Waiting waiting) {
  if (!HasGivenUp(waiting) && IsOther(meeting, Thread())) Tell(meeting, Thread());
}

TFDIST_KERNEL tfdist_unpack(List list, Staging staging, Waiting waiting) {
  if (HasGivenUp(waiting)) return;
  for (uint64_t v = ThreadOfGrid(); v < list.vectors; v += ThreadsOfGrid()) {
    StoreVector(list, v, Vectors(staging.of[v / staging.part])[v]);
  }
}

// Reduces this rank's part in place: nobody else reads it before the next meeting.
template <typename T, typename Op, typename S>
void ReducePart(uint64_t vectors, const Staging& staging, double divisor) {
  constexpr uint32_t kAtOnce = std::is_integral_v<T> ? 1 : 2;  // or there are not enough registers
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

// Each block has its own values and meets the same blocks of the other ranks, whichever run.
template <typename T, typename Op, typename S>
void InOneShot(const List& list, const Staging& staging, const Meeting& meeting,
               const Waiting& waiting, double divisor) {
  const uint64_t share = (list.vectors + Blocks() - 1) / Blocks();
  const uint64_t begin = share * BlockIndex();
  const uint64_t end = begin + share < list.vectors ? begin + share : list.vectors;
  Vector* const own = Vectors(staging.of[staging.rank]);
  for (uint64_t v = begin + Thread(); v < end; v += ThreadsOfBlock()) {
    own[v] = LoadVector(list, v);
  }
  if (!Meet(meeting, waiting)) return;
  const auto put = [&](uint64_t v, const Vector& result) { StoreVector(list, v, result); };
  for (uint64_t v = begin + Thread(); v < end; v += ThreadsOfBlock()) {
    ReduceVectors<T, Op, S, 1>(staging.of, staging.ranks, v, 0, divisor, put);
  }
}

#define TFDIST_REDUCE(name, T, Op, S)                                                    \
  TFDIST_KERNEL tfdist_reduce_##name(uint64_t vectors, Staging staging, Waiting waiting, \
                                     double divisor) {                                   \
    if (!HasGivenUp(waiting)) ReducePart<T, Op, S>(vectors, staging, divisor);           \
  }                                                                                      \
  TFDIST_KERNEL tfdist_one_shot_##name(List list, Staging staging, Meeting meeting,      \
                                       Waiting waiting, double divisor) {                \
    if (AllOfBlock(!HasGivenUp(waiting))) {                                              \
      InOneShot<T, Op, S>(list, staging, meeting, waiting, divisor);                     \
    }                                                                                    \
  }
TFDIST_FOR_ALL_REDUCTIONS(TFDIST_REDUCE)

}  // namespace tfdist::device
