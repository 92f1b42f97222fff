// Tiles of tensors, and the threads that handle one.
#pragma once

#include <cstdint>

namespace tfdist::device {

// Words of memory shared by the threads of a block.
constexpr uint32_t kBlockWords = 2048;

// The threads that handle a block or a tile together.
constexpr uint32_t kHalfWarp = 16;

// Tensors are cut into tiles, each handled by a half-warp.
constexpr uint32_t kTile = 32 * kHalfWarp;  // values: one bit of a word for each value of a thread

constexpr uint32_t TilesOf(uint32_t count) { return (count + kTile - 1) / kTile; }

// Some of an operation's tensors, passed to kernels by value. `T` has the `count` of its values and
// the index of its `first_tile` among the operation's tiles.
template <typename T>
struct TiledList {
  static constexpr uint32_t kMax = 64;
  uint32_t count;
  uint32_t number;  // index of the first tensor among all of the operation's
  uint32_t first_tile;
  uint32_t tiles;
  T tensors[kMax];
};

}  // namespace tfdist::device
