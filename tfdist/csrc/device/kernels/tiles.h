// Tensors cut into tiles, each of which a team sees to.
#pragma once

#include <cstdint>

#include "device/kernels/execution.h"

namespace tfdist::device {

constexpr uint32_t kTile = 32 * kTeam;  // values: a word has a bit for each that a thread sees to

constexpr uint32_t TilesOf(uint32_t count) { return (count + kTile - 1) / kTile; }

// Some of an operation's tensors, passed to kernels by value. `T` has the `count` of its values and the
// number of its `first_tile` among all of the operation's.
template <typename T>
struct TiledList {
  static constexpr uint32_t kMost = 64;
  uint32_t count;
  uint32_t number;  // of the first tensor, among all of the operation's
  uint32_t first_tile;
  uint32_t tiles;
  T tensors[kMost];
};

// Which of the tensors a tile belongs to.
template <typename T>
uint32_t FindTensor(const TiledList<T>& list, uint32_t tile) {
  uint32_t first = 0, behind = list.count;
  while (behind - first > 1) {
    const uint32_t middle = (first + behind) / 2;
    if (list.tensors[middle].first_tile <= tile) {
      first = middle;
    } else {
      behind = middle;
    }
  }
  return first;
}

// Calls `use(tensor, number, tile, begin, count)` for each tile that this thread's team sees to, with
// the place of its values in the tensor.
template <typename T, typename Use>
void ForTiles(const TiledList<T>& list, Use use) {
  for (uint64_t i = TeamOfGrid(); i < list.tiles; i += TeamsOfGrid()) {
    const uint32_t tile = list.first_tile + static_cast<uint32_t>(i);
    const uint32_t k = FindTensor(list, tile);
    const T& tensor = list.tensors[k];
    const uint32_t begin = (tile - tensor.first_tile) * kTile, rest = tensor.count - begin;
    use(tensor, list.number + k, tile, begin, rest < kTile ? rest : kTile);
  }
}

}  // namespace tfdist::device
