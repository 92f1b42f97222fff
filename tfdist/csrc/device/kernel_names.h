// The names of all kernels.
#pragma once

#include <vector>

namespace tfdist {

// For a `KernelModule`.
std::vector<const char*> KernelNames();

}  // namespace tfdist
