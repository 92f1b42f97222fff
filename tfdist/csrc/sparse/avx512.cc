// Compiles the functions in `sparse/kernels.inc` for AVX-512.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include "sparse/units.h"

// This pragma must follow the standard headers. Otherwise, it would also apply to their inline
// functions, and the linker could use these AVX-512 versions for code that must run on any CPU.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

namespace tfdist {
namespace {
#include "sparse/kernels.inc"
}  // namespace

size_t PassOnAvx512(const Pass& pass) { return RunPass(pass); }

}  // namespace tfdist

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
