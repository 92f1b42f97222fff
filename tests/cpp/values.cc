#include "cpp/values.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "reduce/half.h"

namespace tfdist::testing {
namespace {

// Values that half types represent exactly, and so are their sums and products over few ranks. They
// do not repeat, so that a misplaced part is detected; they are scattered by the golden ratio.
double Value(int rank, size_t i) {
  const uint64_t scattered = (i + 1) * 0x9e3779b97f4a7c15;
  return static_cast<double>(((scattered >> 40) + static_cast<uint64_t>(rank) * 3) % 4);
}

void Put(DType type, double value, char* at) {
  const auto put = [at](auto typed) { std::memcpy(at, &typed, sizeof(typed)); };
  switch (type) {
    case DType::kBool:
      return put(static_cast<uint8_t>(value != 0));
    case DType::kUint8:
      return put(static_cast<uint8_t>(value));
    case DType::kInt8:
      return put(static_cast<int8_t>(value));
    case DType::kInt32:
      return put(static_cast<int32_t>(value));
    case DType::kInt64:
      return put(static_cast<int64_t>(value));
    case DType::kFloat32:
      return put(static_cast<float>(value));
    case DType::kFloat64:
      return put(value);
    case DType::kFloat16: {
      Float16 half;
      FromFloat(static_cast<float>(value), &half);
      return put(half);
    }
    case DType::kBfloat16: {
      Bfloat16 half;
      FromFloat(static_cast<float>(value), &half);
      return put(half);
    }
  }
}

double Reduced(DType type, ReduceOp op, int ranks, size_t i) {
  double result = Value(0, i);
  if (type == DType::kBool) result = result != 0;
  for (int rank = 1; rank < ranks; ++rank) {
    double next = Value(rank, i);
    if (type == DType::kBool) next = next != 0;
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kMean:
        result += next;
        break;
      case ReduceOp::kMin:
        result = std::min(result, next);
        break;
      case ReduceOp::kMax:
        result = std::max(result, next);
        break;
      case ReduceOp::kProduct:
        result *= next;
        break;
    }
  }
  return op == ReduceOp::kMean ? result / ranks : result;
}

template <typename T>
bool AreNans(const char* a, const char* b) {
  T x, y;
  std::memcpy(&x, a, sizeof(T));
  std::memcpy(&y, b, sizeof(T));
  if constexpr (sizeof(T) == 2) {
    return std::isnan(ToFloat(x)) && std::isnan(ToFloat(y));
  } else {
    return std::isnan(x) && std::isnan(y);
  }
}

}  // namespace

std::vector<char> Fill(DType type, size_t count, int rank, size_t offset) {
  std::vector<char> data(count * SizeOf(type));
  for (size_t i = 0; i < count; ++i) Put(type, Value(rank, i + offset), &data[i * SizeOf(type)]);
  return data;
}

std::vector<char> Expected(DType type, ReduceOp op, int ranks, size_t count, size_t offset) {
  std::vector<char> data(count * SizeOf(type));
  for (size_t i = 0; i < count; ++i) {
    double value = Reduced(type, op, ranks, i + offset);
    // The product wraps around in small integers.
    if (type == DType::kUint8) value = static_cast<uint8_t>(static_cast<int64_t>(value));
    if (type == DType::kInt8) value = static_cast<int8_t>(static_cast<int64_t>(value));
    if (type == DType::kInt32) value = static_cast<int32_t>(static_cast<int64_t>(value));
    Put(type, value, &data[i * SizeOf(type)]);
  }
  return data;
}

bool AreEqual(DType type, const char* a, const char* b) {
  if (std::memcmp(a, b, SizeOf(type)) == 0) return true;
  switch (type) {
    case DType::kFloat16:
      return AreNans<Float16>(a, b);
    case DType::kBfloat16:
      return AreNans<Bfloat16>(a, b);
    case DType::kFloat32:
      return AreNans<float>(a, b);
    case DType::kFloat64:
      return AreNans<double>(a, b);
    default:
      return false;
  }
}

}  // namespace tfdist::testing
