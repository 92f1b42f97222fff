// The sizes that the ranks have told each other, and room for what comes.
#pragma once

#include <cstddef>
#include <vector>

#include "collective/operation.h"
#include "transport/fabric.h"

namespace tfdist {

// Sets `operation.out` to room for `bytes`, those that come from each rank, which are believed only
// as far as there is room for them. Where the caller has made the room already, they must be what it
// expects. Throws Error(kMismatch) that names the first rank whose bytes cannot be, or
// Error(kInternal) where there is no memory.
void MakeRoom(const Topology& topology, Operation& operation, const std::vector<size_t>& bytes);

}  // namespace tfdist
