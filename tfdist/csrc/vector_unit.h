// The vector instructions of this processor, and its floating-point mode.
#pragma once

#include <cstdint>
#include <string>

namespace tfdist {

// The vector units that code is compiled for.
enum class VectorUnit { kBaseline, kAvx2, kAvx512 };

// Returns the chosen vector unit, or the best one of this processor.
VectorUnit FindVectorUnit();

// "baseline", "avx2" or "avx512".
const char* NameOf(VectorUnit unit);

// Selects a vector unit, "" for the best; call it before any computation. Throws
// Error(kInvalidArgument) if it is unknown or this processor lacks it.
void ChooseVectorUnit(const std::string& name);

}  // namespace tfdist

// The floating-point mode of all computation in the core.
//
// A thread inherits the mode of its creator. TensorFlow's threads flush denormal numbers to zero,
// and so does a thread that has loaded a library built with -ffast-math. Ranks that reduce the same
// values must get the same bits, regardless of their threads' history.

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tfdist {

// During its lifetime, this thread rounds to nearest, ties to even, and keeps denormal numbers.
class FloatMode {
 public:
  FloatMode() : before_(Get()) { Set(kDefault); }
  ~FloatMode() { Set(before_); }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kDefault = 0x1f80;  // all exceptions masked
  static uint64_t Get() { return _mm_getcsr(); }
  static void Set(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kDefault = 0;
  static uint64_t Get() {
    uint64_t mode;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void Set(uint64_t mode) { __asm__ __volatile__("msr fpcr, %0" : : "r"(mode)); }
#else
  static constexpr uint64_t kDefault = 0;
  static uint64_t Get() { return 0; }
  static void Set(uint64_t) {}
#endif
  const uint64_t before_;
};

}  // namespace tfdist
