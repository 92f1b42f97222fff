// The reductions of each vector unit.
#pragma once

#include "reduce/reduce.h"

namespace tfdist {

void ReduceOnBaseline(const Reduction& reduction);
void ReduceOnAvx2(const Reduction& reduction);
void ReduceOnAvx512(const Reduction& reduction);

}  // namespace tfdist
