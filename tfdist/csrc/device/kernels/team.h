// Threads of a block that go together, half of a warp.
#pragma once

#include <cstdint>

namespace tfdist::device {

constexpr uint32_t kTeam = 16;

}  // namespace tfdist::device
