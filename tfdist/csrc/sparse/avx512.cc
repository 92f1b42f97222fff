// The passes of `sparse/units.h`, compiled for AVX-512.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include "sparse/units.h"

// This pragma follows the standard headers, so that it does not apply to their inline functions.
// The linker may use those functions in code that must run on any processor.
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
