// Cuts an operation's tensors into the lists that kernels are launched with.
#pragma once

#include <cstdint>
#include <vector>

#include "device/grid.h"
#include "device/kernels/tiles.h"

namespace tfdist {

// Args: tensors: of which this sets `first` and `first_tile`.
template <typename T>
std::vector<device::TiledList<T>> Tiled(const std::vector<T>& tensors) {
  std::vector<device::TiledList<T>> lists;
  uint32_t number = 0, first = 0, first_tile = 0;
  for (T tensor : tensors) {
    if (lists.empty() || lists.back().count == lists.back().kMost) {
      lists.push_back({0, number, first_tile, 0, {}});
    }
    tensor.first = first;
    tensor.first_tile = first_tile;
    device::TiledList<T>& list = lists.back();
    list.tensors[list.count++] = tensor;
    list.tiles += device::TilesOf(tensor.count);
    first += tensor.count;
    first_tile += device::TilesOf(tensor.count);
    ++number;
  }
  return lists;
}

// Of a kernel in which teams see to so many things.
inline unsigned BlocksForTeams(uint64_t things) {
  return BlocksFor(things * device::kTeam, kMostBlocksAlone);
}

}  // namespace tfdist
