// The tiles of tensors, and the threads that handle a tile.
#pragma once

#include <cstdint>

namespace tfdist::device {

// The number of words of memory that the threads of a block share.
constexpr uint32_t kBlockWords = 2048;

// The number of threads that handle a block of values or a tile together.
constexpr uint32_t kHalfWarp = 16;

// The number of values in a tile. Tensors are cut into tiles, and a half-warp handles each tile.
// Each thread then handles 32 values, so one word has a bit for each of its values.
constexpr uint32_t kTile = 32 * kHalfWarp;

constexpr uint32_t TilesOf(uint32_t count) { return (count + kTile - 1) / kTile; }

// Some of the tensors of an operation, in a list that is passed to kernels by value. `T` has the
// members `count`, which is the number of the tensor's values, and `first_tile`, which is the index
// of the tensor's first tile among all tiles of the operation.
template <typename T>
struct TiledList {
  static constexpr uint32_t kMax = 64;
  uint32_t count;
  uint32_t number;  // index of the list's first tensor among all tensors of the operation
  uint32_t first_tile;
  uint32_t tiles;
  T tensors[kMax];
};

}  // namespace tfdist::device
