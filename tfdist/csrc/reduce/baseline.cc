// The reductions, compiled for any processor of the architecture.
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "reduce/half.h"
#include "reduce/reduce.h"

namespace tfdist {
namespace {
#include "reduce/kernels.inc"
}  // namespace

void ReduceOnBaseline(const Reduction& reduction) { ReduceWith(reduction); }

}  // namespace tfdist
