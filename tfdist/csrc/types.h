// The element types and reductions that collectives know.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tfdist {

enum class DType : uint8_t {
  kBool,
  kUint8,
  kInt8,
  kInt32,
  kInt64,
  kFloat16,
  kBfloat16,
  kFloat32,
  kFloat64,
};
constexpr int kDTypes = 9;

enum class ReduceOp : uint8_t { kSum, kMean, kMin, kMax, kProduct };
constexpr int kReduceOps = 5;

enum class Kind : uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kAllToAll,
  kBarrier,
  kSend,
  kReceive,
};
constexpr int kKinds = 8;

constexpr size_t SizeOf(DType type) {
  switch (type) {
    case DType::kBool:
    case DType::kUint8:
    case DType::kInt8:
      return 1;
    case DType::kFloat16:
    case DType::kBfloat16:
      return 2;
    case DType::kInt32:
    case DType::kFloat32:
      return 4;
    case DType::kInt64:
    case DType::kFloat64:
      return 8;
  }
  return 1;
}

constexpr bool IsFloating(DType type) { return type >= DType::kFloat16; }

// The type of partial results, which are reduced further: half types are rounded once, at the end,
// and the sum of equal float32 values is exact, so that their mean is that value.
constexpr DType PartialType(DType type, ReduceOp op) {
  if (type == DType::kFloat16 || type == DType::kBfloat16) return DType::kFloat32;
  return type == DType::kFloat32 && op == ReduceOp::kMean ? DType::kFloat64 : type;
}

const char* NameOf(DType type);
const char* NameOf(ReduceOp op);
const char* NameOf(Kind kind);

}  // namespace tfdist
