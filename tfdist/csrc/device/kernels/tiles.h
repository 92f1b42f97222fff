// Tiles of tensors, and the threads that share one.
#pragma once

#include <cstdint>

namespace tfdist::device {

// Words of memory that the threads of a block share.
constexpr uint32_t kBlockWords = 2048;

// Threads of a block that go together, half of a warp.
constexpr uint32_t kTeam = 16;

// Tensors are cut into tiles, each of which a team handles.
constexpr uint32_t kTile = 32 * kTeam;  // values: a word has a bit for each that a thread sees to

constexpr uint32_t TilesOf(uint32_t count) { return (count + kTile - 1) / kTile; }

// Some of an operation's tensors, passed to kernels by value. `T` has the `count` of its values and
// the number of its `first_tile` among all of the operation's.
template <typename T>
struct TiledList {
  static constexpr uint32_t kMost = 64;
  uint32_t count;
  uint32_t number;  // of the first tensor, among all of the operation's
  uint32_t first_tile;
  uint32_t tiles;
  T tensors[kMost];
};

}  // namespace tfdist::device
