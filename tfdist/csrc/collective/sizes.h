// What comes from each rank must be what this one has made room for.
#pragma once

#include <cstddef>
#include <vector>

#include "collective/operation.h"
#include "transport/fabric.h"

namespace tfdist {

// Throws Error(kMismatch) that names the first rank whose bytes are not `received_bytes`.
void CheckSizes(const Topology& topology, const Operation& operation,
                const std::vector<size_t>& bytes);

}  // namespace tfdist
