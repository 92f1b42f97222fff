// The reductions: every vector unit of this processor yields the same, correct bits.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cpp/ranks.h"
#include "reduce/half.h"
#include "reduce/reduce.h"

namespace tfdist::testing {
namespace {

struct Unit {
  const char* name;
  void (*reduce)(const Reduction&);
};

std::vector<Unit> Units() {
  std::vector<Unit> units{{"baseline", ReduceOnBaseline}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    units.push_back({"avx2", ReduceOnAvx2});
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    units.push_back({"avx512", ReduceOnAvx512});
  }
#endif
  return units;
}

template <typename T>
T Read(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

template <typename T>
T Combine(ReduceOp op, T a, T b) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMean:
      return static_cast<T>(a + b);
    case ReduceOp::kProduct:
      return static_cast<T>(a * b);
    case ReduceOp::kMin:
      return a != a || b != b ? a + b : a < b ? a : b;
    case ReduceOp::kMax:
      return a != a || b != b ? a + b : a > b ? a : b;
  }
  return a;
}

// One element after the other. `As` is the type of the sums; unsigned for integers, which wrap
// around.
template <typename T, typename As>
void ReduceSlowly(const Reduction& r) {
  for (size_t i = 0; i < r.count; ++i) {
    const auto in = [&](int k) {
      return static_cast<As>(Read<T>(static_cast<const char*>(r.in[k]) + i * sizeof(T)));
    };
    As value = in(0);
    for (int k = 1; k < r.inputs; ++k) {
      const bool ordered = r.op == ReduceOp::kMin || r.op == ReduceOp::kMax;
      value = ordered
                  ? static_cast<As>(Combine<T>(r.op, static_cast<T>(value), static_cast<T>(in(k))))
                  : Combine<As>(r.op, value, in(k));
    }
    if (r.divisor != 1.0) value = static_cast<As>(value / static_cast<As>(r.divisor));
    const T result = static_cast<T>(value);
    std::memcpy(static_cast<char*>(r.out) + i * sizeof(T), &result, sizeof(T));
  }
}

template <typename T>
void ReduceHalvesSlowly(const Reduction& r) {
  for (size_t i = 0; i < r.count; ++i) {
    const auto in = [&](int k) {
      return ToFloat(Read<T>(static_cast<const char*>(r.in[k]) + i * sizeof(T)));
    };
    float value = in(0);
    for (int k = 1; k < r.inputs; ++k) value = Combine<float>(r.op, value, in(k));
    if (r.divisor != 1.0) value /= static_cast<float>(r.divisor);
    T result;
    FromFloat(value, &result);
    std::memcpy(static_cast<char*>(r.out) + i * sizeof(T), &result, sizeof(T));
  }
}

void ReduceSlowly(Reduction r) {
  if (r.type == DType::kBool) {
    const bool any = r.op == ReduceOp::kSum || r.op == ReduceOp::kMax;
    r.op = any ? ReduceOp::kMax : ReduceOp::kMin;
  }
  switch (r.type) {
    case DType::kBool:
    case DType::kUint8:
      return ReduceSlowly<uint8_t, unsigned>(r);
    case DType::kInt8:
      return ReduceSlowly<int8_t, unsigned>(r);
    case DType::kInt32:
      return ReduceSlowly<int32_t, uint32_t>(r);
    case DType::kInt64:
      return ReduceSlowly<int64_t, uint64_t>(r);
    case DType::kFloat16:
      return ReduceHalvesSlowly<Float16>(r);
    case DType::kBfloat16:
      return ReduceHalvesSlowly<Bfloat16>(r);
    case DType::kFloat32:
      return r.divisor == 1.0 ? ReduceSlowly<float, float>(r) : ReduceSlowly<float, double>(r);
    case DType::kFloat64:
      return ReduceSlowly<double, double>(r);
  }
}

bool IsNan(DType type, const char* at) {
  switch (type) {
    case DType::kFloat16:
      return std::isnan(ToFloat(Read<Float16>(at)));
    case DType::kBfloat16:
      return std::isnan(ToFloat(Read<Bfloat16>(at)));
    case DType::kFloat32:
      return std::isnan(Read<float>(at));
    case DType::kFloat64:
      return std::isnan(Read<double>(at));
    default:
      return false;
  }
}

// Whether the bits are equal; ignores the payloads of NaNs.
bool Same(DType type, const char* a, const char* b, size_t count) {
  const size_t element = SizeOf(type);
  if (count == 0 || std::memcmp(a, b, count * element) == 0) return true;
  for (size_t i = 0; i < count * element; i += element) {
    if (std::memcmp(a + i, b + i, element) != 0 && !(IsNan(type, a + i) && IsNan(type, b + i))) {
      return false;
    }
  }
  return true;
}

std::mt19937_64 bits(1);

// Arbitrary bits, including NaNs, infinities and denormal numbers; every other value is ordinary,
// so that sums are not mostly infinite.
void Fill(DType type, char* to, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    char* at = to + i * SizeOf(type);
    const uint64_t random = bits();
    const double ordinary = static_cast<double>(static_cast<int64_t>(random)) / 1e17;
    std::memcpy(at, &random, SizeOf(type));
    if (type == DType::kBool) *at = static_cast<char>(random & 1);
    if (random % 2) continue;
    const auto put = [at](auto value) { std::memcpy(at, &value, sizeof(value)); };
    if (type == DType::kFloat32) put(static_cast<float>(ordinary));
    if (type == DType::kFloat64) put(ordinary);
    if (type == DType::kFloat16) {
      Float16 half;
      FromFloat(static_cast<float>(ordinary), &half);
      put(half);
    }
    if (type == DType::kBfloat16) {
      Bfloat16 half;
      FromFloat(static_cast<float>(ordinary), &half);
      put(half);
    }
  }
}

constexpr int kMaxInputs = 5;

// `shift`: elements from an aligned address. `into`: the input that is also the output, or -1.
void CheckReduction(const Unit& unit, DType type, ReduceOp op, int inputs, size_t count, int shift,
                    int into) {
  const size_t bytes = count * SizeOf(type), skipped = static_cast<size_t>(shift) * SizeOf(type);
  constexpr size_t kGuard = 64;
  constexpr char kMark = 0x5a;
  std::vector<std::vector<char>> in;
  const void* pointers[kMaxInputs];
  for (int k = 0; k < inputs; ++k) {
    in.emplace_back(skipped * size_t(k + 1) + bytes + kGuard, kMark);
    char* begin = in.back().data() + skipped * size_t(k + 1);
    Fill(type, begin, count);
    pointers[k] = begin;
  }
  std::vector<char> out(skipped + bytes + kGuard, kMark), expected(bytes);
  char* to =
      into < 0 ? out.data() + skipped : const_cast<char*>(static_cast<const char*>(pointers[into]));
  const double divisor = op == ReduceOp::kMean ? inputs : 1.0;
  ReduceSlowly({type, op, divisor, pointers, inputs, count, expected.data()});
  unit.reduce({type, op, divisor, pointers, inputs, count, to});
  bool same = Same(type, to, expected.data(), count);
  for (size_t i = 0; i < kGuard; ++i) same = same && to[bytes + i] == kMark;
  if (!same) {
    throw Failure(std::string(unit.name) + " " + NameOf(op) + " of " + std::to_string(inputs) +
                  " x " + std::to_string(count) + " " + NameOf(type) + ", shifted by " +
                  std::to_string(shift) + ", into " + std::to_string(into));
  }
}

void EveryReduction(const Unit& unit) {
  for (int t = 0; t < kDTypes; ++t) {
    const auto type = static_cast<DType>(t);
    for (int o = 0; o < kReduceOps; ++o) {
      const auto op = static_cast<ReduceOp>(o);
      if (op == ReduceOp::kMean && !IsFloating(type)) continue;
      for (int inputs = 1; inputs <= kMaxInputs; ++inputs) {
        for (const size_t count : {size_t{0}, size_t{1}, size_t{3}, size_t{77}, size_t{2501}}) {
          CheckReduction(unit, type, op, inputs, count, 0, -1);
          CheckReduction(unit, type, op, inputs, count, 1, -1);
          CheckReduction(unit, type, op, inputs, count, 0, 0);
          CheckReduction(unit, type, op, inputs, count, 3, inputs - 1);
        }
      }
    }
  }
}

// The value of a half type's bits, by definition.
double Value(uint16_t half, int exponent_bits) {
  const int fraction_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (half >> fraction_bits) & ((1 << exponent_bits) - 1);
  const int fraction = half & ((1 << fraction_bits) - 1);
  const double sign = half & 0x8000 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) return fraction ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
}

template <typename Half>
uint16_t Rounded(float value) {
  Half half;
  FromFloat(value, &half);
  return half.bits;
}

// Every half, the middle between it and its neighbor, and the adjacent floats.
template <typename Half>
void EveryHalf(int exponent_bits) {
  const int infinity = ((1 << exponent_bits) - 1) << (15 - exponent_bits);
  for (int h = 0; h < 65536; ++h) {
    const auto half = static_cast<uint16_t>(h);
    const double value = Value(half, exponent_bits);
    const float converted = ToFloat(Half{half});
    if (std::isnan(value)) {
      EXPECT(std::isnan(converted) && std::isnan(Value(Rounded<Half>(converted), exponent_bits)));
      continue;
    }
    EXPECT(static_cast<double>(converted) == value);
    EXPECT(std::signbit(converted) == std::signbit(value));
    EXPECT(Rounded<Half>(converted) == half);
    if ((half & 0x7fff) == infinity) continue;
    const auto next = static_cast<uint16_t>(half + 1);
    // Values round to infinity from half way to the hypothetical next number.
    const double last = Value(static_cast<uint16_t>(half - 1), exponent_bits);
    const bool is_last = (next & 0x7fff) == infinity;
    const double after = is_last ? 2 * value - last : Value(next, exponent_bits);
    const auto middle = static_cast<float>((value + after) / 2);
    if (static_cast<double>(middle) != (value + after) / 2) continue;  // not a float
    EXPECT(Rounded<Half>(middle) == (half % 2 ? next : half));
    EXPECT(Rounded<Half>(std::nextafter(middle, 0.0f)) == half);
    EXPECT(Rounded<Half>(std::nextafter(middle, middle < 0 || half >> 15 ? -INFINITY : INFINITY)) ==
           next);
  }
}

}  // namespace
}  // namespace tfdist::testing

int main() {
  using namespace tfdist::testing;
  try {
    EveryHalf<tfdist::Float16>(5);
    EveryHalf<tfdist::Bfloat16>(8);
    for (const Unit& unit : Units()) {
      EveryReduction(unit);
      std::printf("reductions on %s: ok\n", unit.name);
    }
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return 1;
  }
}
