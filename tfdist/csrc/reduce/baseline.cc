// Compiles the reductions in `reduce/kernels.inc` for all CPUs of the architecture.
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
