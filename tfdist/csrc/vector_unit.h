// The vector unit that this processor has, of those that code is compiled for.
#pragma once

#include <string>

namespace tfdist {

enum class VectorUnit { kBaseline, kAvx2, kAvx512 };

// The best one, or the one that was chosen.
VectorUnit FindVectorUnit();

// "baseline", "avx2" or "avx512".
const char* NameOf(VectorUnit unit);

// Chooses one, "" for the best; before anything is computed. Throws Error(kInvalidArgument) if it is
// unknown, or this processor lacks it.
void ChooseVectorUnit(const std::string& name);

}  // namespace tfdist
