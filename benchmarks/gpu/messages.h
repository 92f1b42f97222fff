// Measures the messages between two stages of a pipeline that share a GPU.
#pragma once

#include "comparing.h"

namespace tfdist::benchmark {

// Measures messages between two communicators of this process, and a plain copy for comparison. A
// message is copied through the staging buffers of the receiver. Prints the figures.
void MeasureMessages(const Extent& extent, const std::string& kernels);

}  // namespace tfdist::benchmark
