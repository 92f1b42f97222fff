// The rows that the ranks have told each other, and room for what comes.
#pragma once

#include <cstddef>
#include <vector>

#include "collective/operation.h"
#include "transport/fabric.h"

namespace tfdist {

// Sets `operation.out` to room for the rows that come from each rank, which are believed only as far
// as there is room for them. Where the caller has made the room already, they must be what it
// expects. Returns the bytes that come from each rank. Throws Error(kMismatch) that names the first
// rank whose rows cannot be, or Error(kInternal) where there is no memory.
std::vector<size_t> MakeRoom(const Topology& topology, Operation& operation,
                             const std::vector<size_t>& rows);

}  // namespace tfdist
