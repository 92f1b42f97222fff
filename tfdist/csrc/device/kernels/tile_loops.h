// Distributes the tiles of tensors among half-warps.
#pragma once

#include <cstdint>

#include "device/kernels/execution.h"
#include "device/kernels/tiles.h"

namespace tfdist::device {

// Returns the index of the tensor that contains a tile. This is an index into `list.tensors`.
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

// Calls `use(tensor, number, tile, begin, count)` for each tile that this thread's half-warp
// handles. The tile consists of the values [begin, begin + count) of `tensor`. Its index among all
// tiles of the operation is `tile`, and the index of the tensor among all tensors of the operation
// is `number`.
template <typename T, typename Use>
void ForTiles(const TiledList<T>& list, Use use) {
  for (uint64_t i = HalfWarpOfGrid(); i < list.tiles; i += HalfWarpsOfGrid()) {
    const uint32_t tile = list.first_tile + static_cast<uint32_t>(i);
    const uint32_t k = FindTensor(list, tile);
    const T& tensor = list.tensors[k];
    const uint32_t begin = (tile - tensor.first_tile) * kTile, rest = tensor.count - begin;
    use(tensor, list.number + k, tile, begin, rest < kTile ? rest : kTile);
  }
}

}  // namespace tfdist::device
