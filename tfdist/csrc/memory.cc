#include "memory.h"

#include <cstdint>
#include <cstring>

// Sanitizers cannot see the memory accesses of inline assembly, so memcpy is used if the core is
// compiled with a sanitizer.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define TFDIST_OWN_COPIES
#endif

#if defined(TFDIST_OWN_COPIES)
#include <x86intrin.h>
#endif

namespace tfdist {

#if defined(TFDIST_OWN_COPIES)

void CopyNear(void* to, const void* from, size_t bytes) {
  asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
}

void CopyFar(void* to, const void* from, size_t bytes) {
  constexpr size_t kLine = 64;
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(out) % kLine) % kLine;
  if (bytes < head + kLine) {
    std::memcpy(out, in, bytes);
    return;
  }
  std::memcpy(out, in, head);
  out += head, in += head, bytes -= head;
  for (; bytes >= kLine; out += kLine, in += kLine, bytes -= kLine) {
    const auto* line = reinterpret_cast<const __m128i*>(in);
    const __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1),
                  c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
    auto* target = reinterpret_cast<__m128i*>(out);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(out, in, bytes);
  // Non-temporal stores may complete late. This fence ensures that they are complete before the
  // caller sets the flag that publishes the data.
  _mm_sfence();
}

unsigned long TicksToRead(const void* word) {
  _mm_lfence();
  const unsigned long begin = __rdtsc();
  _mm_lfence();
  (void)*static_cast<const volatile char*>(word);
  _mm_lfence();
  return __rdtsc() - begin;
}

#else

void CopyNear(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

void CopyFar(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

unsigned long TicksToRead(const void*) { return 0; }

#endif

}  // namespace tfdist
