// The vector unit that this processor has, of those that code is compiled for.
#pragma once

namespace tfdist {

enum class VectorUnit { kBaseline, kAvx2, kAvx512 };

VectorUnit FindVectorUnit();

}  // namespace tfdist
