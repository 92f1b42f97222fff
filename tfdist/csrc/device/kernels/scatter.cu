// Sums the rows of all ranks into tensors, in the order of the ranks. The results are bitwise
// identical to the results on the CPU. A half-warp handles a tile of a tensor. For each rank, it
// finds the rows that belong to the tile by a binary search, because the rows of a rank have
// ascending indices.
#include <cstdint>

#include "device/kernels/execution.h"
#include "device/kernels/selecting.h"
#include "device/kernels/tile_loops.h"
#include "reduce/half.h"
#include "sparse/row.h"

namespace tfdist::device {
namespace {

constexpr uint32_t kNoNumber = 0x7fc00000;

// Returns the position of the first row in [begin, end) that has an index of at least `index`.
// Returns `end` if there is no such row.
uint32_t FindRow(const Row* rows, uint32_t begin, uint32_t end, uint32_t index) {
  while (begin < end) {
    const uint32_t middle = begin + (end - begin) / 2;
    if (static_cast<uint32_t>(rows[middle].index) < index) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

}  // namespace

// Counts invalid rows, and finds the positions at which a run of ascending indices ends and the
// next run begins.
// Args: values: the total number of values in all tensors.
TFDIST_WIDE_KERNEL tfdist_scatter_find(const Row* rows, uint32_t count, uint32_t values,
                                       RowRuns runs) {
  for (uint64_t r = ThreadOfGrid(); r < count; r += ThreadsOfGrid()) {
    if (static_cast<uint32_t>(rows[r].index) >= values) AddTo(runs.wrong, 1);
    if (r == 0 || rows[r].index > rows[r - 1].index) continue;
    const uint32_t fall = AddTo(runs.falls, 1);
    if (fall + 1 < runs.max_runs) {
      runs.found[fall] = static_cast<uint32_t>(r);
    } else {
      AddTo(runs.wrong, 1);
    }
  }
}

TFDIST_WIDE_KERNEL tfdist_scatter_order(uint32_t count, RowRuns runs) {
  if (*runs.wrong != 0) return;
  const uint32_t falls = *runs.falls;
  for (uint64_t i = ThreadOfGrid(); i < falls; i += ThreadsOfGrid()) {
    uint32_t place = 1;
    for (uint32_t other = 0; other < falls; ++other) place += runs.found[other] < runs.found[i];
    runs.begins[place] = runs.found[i];
  }
  if (ThreadOfGrid() > 0) return;
  runs.begins[0] = 0;
  runs.begins[falls + 1] = count;
}

TFDIST_WIDE_KERNEL tfdist_scatter_sum(Targets list, const Row* rows, RowRuns runs) {
  const bool wrong = *runs.wrong != 0;
  const uint32_t end = wrong ? 0 : *runs.falls + 1;
  ForTiles(list, [&](const Target& t, uint32_t, uint32_t, uint32_t begin, uint32_t count) {
    float* const values = t.values + begin;
    const uint32_t first = t.first + begin;
    for (uint32_t i = Lane(); i < count; i += kHalfWarp)
      values[i] = wrong ? BitsToFloat(kNoNumber) : 0;
    for (uint32_t run = 0; run < end; ++run) {
      const uint32_t last = runs.begins[run + 1];
      const uint32_t from = FindRow(rows, runs.begins[run], last, first);
      const uint32_t to = FindRow(rows, from, last, first + count);
      if (from == to) continue;
      // In the previous run, other threads may have added to the same values, so wait for them.
      SyncHalfWarp();
      for (uint32_t r = from + Lane(); r < to; r += kHalfWarp) {
        values[static_cast<uint32_t>(rows[r].index) - first] += rows[r].value;
      }
    }
  });
}

}  // namespace tfdist::device
