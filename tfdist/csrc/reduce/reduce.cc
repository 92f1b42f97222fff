#include "reduce/reduce.h"

#include <string>

#include "error.h"
#include "vector_unit.h"

namespace tfdist {
namespace {

using Kernel = void (*)(const Reduction&);

Kernel Choose() {
#if defined(__x86_64__)
  switch (FindVectorUnit()) {
    case VectorUnit::kAvx512:
      return ReduceOnAvx512;
    case VectorUnit::kAvx2:
      return ReduceOnAvx2;
    case VectorUnit::kBaseline:
      break;
  }
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
