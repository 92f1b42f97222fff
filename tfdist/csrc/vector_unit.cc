#include "vector_unit.h"

namespace tfdist {

VectorUnit FindVectorUnit() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return VectorUnit::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return VectorUnit::kAvx2;
#endif
  return VectorUnit::kBaseline;
}

}  // namespace tfdist
