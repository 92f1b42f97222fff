// The codecs, compiled for AVX2.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>

// This pragma must follow the standard headers. Otherwise, their inline functions would also be
// compiled for this vector unit, and the linker could use these versions of the functions in code
// that must run on any processor.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif

#include "codec/layout.h"
#include "codec/units.h"
#include "reduce/half.h"

namespace tfdist {
namespace {
#include "codec/kernels.inc"
}  // namespace

void EncodeOnAvx2(const Codec& codec, const EncodeArgs& args) { EncodeWith(codec, args); }
void DecodeOnAvx2(const Codec& codec, const DecodeArgs& args) { DecodeWith(codec, args); }

}  // namespace tfdist

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
