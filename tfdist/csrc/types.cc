#include "types.h"

namespace tfdist {

const char* NameOf(DType type) {
  static const char* const names[] = {"bool",    "uint8",    "int8",    "int32",  "int64",
                                      "float16", "bfloat16", "float32", "float64"};
  const auto i = static_cast<size_t>(type);
  return i < kDTypes ? names[i] : "unknown type";
}

const char* NameOf(ReduceOp op) {
  static const char* const names[] = {"sum", "mean", "min", "max", "product"};
  const auto i = static_cast<size_t>(op);
  return i < kReduceOps ? names[i] : "unknown reduction";
}

const char* NameOf(Kind kind) {
  static const char* const names[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                      "all_to_all", "barrier",        "send",       "receive"};
  const auto i = static_cast<size_t>(kind);
  return i < kKinds ? names[i] : "unknown collective";
}

}  // namespace tfdist
