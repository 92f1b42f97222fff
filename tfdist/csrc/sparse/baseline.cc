// Compiles the functions in `sparse/kernels.inc` for all CPUs of the architecture.
#include <cstdint>
#include <cstring>

#include "sparse/units.h"

namespace tfdist {
namespace {
#include "sparse/kernels.inc"
}  // namespace

size_t PassOnBaseline(const Pass& pass) { return RunPass(pass); }

}  // namespace tfdist
