// Copies into shared memory: any length and alignment, and no write outside the range.
#include <cstring>
#include <vector>

#include "cpp/calls.h"
#include "memory.h"

namespace tfdist::testing {
namespace {

constexpr size_t kRoom = 512;
constexpr size_t kMargin = 128;

void Check(void (*copy)(void*, const void*, size_t), size_t bytes, size_t from, size_t to) {
  std::vector<char> in(kRoom + kMargin), out(kRoom + 2 * kMargin, 'x');
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<char>(i * 7 + 1);
  std::vector<char> expected = out;
  std::memcpy(&expected[kMargin + to], &in[from], bytes);
  copy(&out[kMargin + to], &in[from], bytes);
  EXPECT(out == expected);
}

void EveryLengthAndAlignment() {
  for (const auto copy : {CopyNear, CopyFar}) {
    for (size_t bytes = 0; bytes <= 300; bytes += bytes < 140 ? 1 : 37) {
      for (size_t from = 0; from < 64; from += 13) {
        for (size_t to = 0; to < 64; to += 3) Check(copy, bytes, from, to);
      }
    }
  }
}

}  // namespace
}  // namespace tfdist::testing

int main() { return tfdist::testing::Report(tfdist::testing::EveryLengthAndAlignment); }
