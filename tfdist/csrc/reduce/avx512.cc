// Compiles the reductions in `reduce/kernels.inc` for AVX-512.
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
// This pragma must follow the standard headers. Otherwise, it would also apply to their inline
// functions, and the linker could use these AVX-512 versions for code that must run on any CPU.
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c")
#endif

#include "reduce/half.h"
#include "reduce/reduce.h"

namespace tfdist {
namespace {
#include "reduce/kernels.inc"
}  // namespace

void ReduceOnAvx512(const Reduction& reduction) { ReduceWith(reduction); }

}  // namespace tfdist

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
