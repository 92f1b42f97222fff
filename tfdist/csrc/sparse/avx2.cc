// Compiles the functions in `sparse/kernels.inc` for AVX2.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include "sparse/units.h"

// This pragma must follow the standard headers. Otherwise, it would also apply to their inline
// functions, and the linker could use these AVX2 versions for code that must run on any CPU.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC target("avx2")
#endif

namespace tfdist {
namespace {
#include "sparse/kernels.inc"
}  // namespace

size_t PassOnAvx2(const Pass& pass) { return RunPass(pass); }

}  // namespace tfdist

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
