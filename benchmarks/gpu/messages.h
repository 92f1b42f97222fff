// What a stage of a pipeline sends to the next one, where both have the same GPU.
#pragma once

#include "comparing.h"

namespace tfdist::benchmark {

// Messages between two communicators of this process, by copies to the receiver's staging buffers,
// beside a plain copy. Prints the figures.
void MeasureMessages(const Extent& extent, const std::string& kernels);

}  // namespace tfdist::benchmark
