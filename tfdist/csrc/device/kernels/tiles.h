// Divides tensors into tiles, and defines the number of threads that handle a tile.
#pragma once

#include <cstdint>

namespace tfdist::device {

// The number of 32-bit words in the shared memory of a thread block.
constexpr uint32_t kBlockWords = 2048;

// The number of threads that handle a tile, or a block of encoded values, together.
constexpr uint32_t kHalfWarp = 16;

// The number of values in a tile. A half-warp handles a tile, so each thread handles 32 values. A
// thread can therefore mark its values with the 32 bits of one word.
constexpr uint32_t kTile = 32 * kHalfWarp;

constexpr uint32_t TilesOf(uint32_t count) { return (count + kTile - 1) / kTile; }

// A list of some of the tensors of an operation, which is passed to kernels by value. `T` must have
// two members. `count` is the number of values in the tensor. `first_tile` is the index of the
// tensor's first tile among all tiles of the operation.
template <typename T>
struct TiledList {
  static constexpr uint32_t kMax = 64;
  uint32_t count;
  uint32_t number;  // the index of the list's first tensor among all tensors of the operation
  uint32_t first_tile;
  uint32_t tiles;
  T tensors[kMax];
};

}  // namespace tfdist::device
