#include "vector_unit.h"

#include <atomic>

#include "error.h"

namespace tfdist {
namespace {

VectorUnit Best() {
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

std::atomic<VectorUnit>& Chosen() {
  static std::atomic<VectorUnit> unit{Best()};
  return unit;
}

}  // namespace

VectorUnit FindVectorUnit() { return Chosen(); }

const char* NameOf(VectorUnit unit) {
  switch (unit) {
    case VectorUnit::kBaseline:
      return "baseline";
    case VectorUnit::kAvx2:
      return "avx2";
    case VectorUnit::kAvx512:
      return "avx512";
  }
  return "unknown unit";
}

void ChooseVectorUnit(const std::string& name) {
  std::string names;
  for (const VectorUnit unit : {VectorUnit::kBaseline, VectorUnit::kAvx2, VectorUnit::kAvx512}) {
    if (unit > Best()) break;
    if (name == NameOf(unit)) {
      Chosen() = unit;
      return;
    }
    names += (names.empty() ? "" : ", ") + std::string(NameOf(unit));
  }
  if (name.empty()) {
    Chosen() = Best();
    return;
  }
  throw Error(Code::kInvalidArgument, "The vector unit must be one that this processor has: " +
                                          names + ". Received: " + name + ".");
}

}  // namespace tfdist
