#include "reduce/reduce.h"

#include <string>

#include "error.h"
#include "reduce/units.h"

namespace tfdist {
namespace {

using Kernel = void (*)(const Reduction&);

Kernel Choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return ReduceOnAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return ReduceOnAvx2;
#endif
  return ReduceOnBaseline;
}

}  // namespace

void Reduce(const Reduction& reduction) {
  static const Kernel kernel = Choose();
  if (reduction.count > 0) kernel(reduction);
}

void CheckReducible(DType type, ReduceOp op) {
  if (op == ReduceOp::kMean && !IsFloating(type)) {
    throw Error(Code::kInvalidArgument,
                std::string("A mean is defined for floating types. Received: ") + NameOf(type) +
                    ". Cast the tensor, or take the sum.");
  }
}

}  // namespace tfdist
