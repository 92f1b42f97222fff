// Selects the vector instructions and the floating-point mode that the core uses.
#pragma once

#include <cstdint>
#include <string>

namespace tfdist {

// The vector instruction sets for which the core has separately compiled code.
enum class VectorUnit { kBaseline, kAvx2, kAvx512 };

// Returns the vector unit that `ChooseVectorUnit` has selected. By default, this is the best one
// that the processor supports.
VectorUnit FindVectorUnit();

// Returns "baseline", "avx2" or "avx512".
const char* NameOf(VectorUnit unit);

// Selects the vector unit for all computation. If the name is "", selects the best one that the
// processor supports. Call this function before any computation. Throws Error(kInvalidArgument) if
// the name is unknown, or if the processor does not have this vector unit.
void ChooseVectorUnit(const std::string& name);

}  // namespace tfdist

// The floating-point mode in which the core computes.
//
// The core sets the mode itself, because ranks that reduce the same values must get the same bits.
// Otherwise, the mode would depend on the thread: a new thread inherits the mode of the thread that
// created it. TensorFlow's threads flush denormal numbers to zero, and so does a thread that has
// loaded a library built with -ffast-math.

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tfdist {

// Sets the floating-point mode of this thread, and restores the earlier mode in the destructor. In
// this mode, results are rounded to nearest (ties to even), and denormal numbers are kept.
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
