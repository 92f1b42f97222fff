// Selections, compared with sorting: ties, zeros, values that are not finite, misleading samples,
// and agreement of all vector units.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "cpp/ranks.h"
#include "error.h"
#include "sparse/select.h"
#include "sparse/units.h"
#include "vector_unit.h"

namespace tfdist::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinite = std::numeric_limits<float>::infinity();

std::vector<float> Normal(size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(engine);
  return values;
}

Candidates Of(const std::vector<float>& in) {
  return {in.data(), nullptr, nullptr, in.size(), 1, 0};
}

// The bits of magnitudes, ordered with NaN above infinity.
uint32_t Bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits & 0x7fffffff;
}

std::vector<uint32_t> Sorted(const std::vector<float>& values, size_t selected) {
  std::vector<uint32_t> indices(values.size());
  std::iota(indices.begin(), indices.end(), 0u);
  std::stable_sort(indices.begin(), indices.end(),
                   [&values](uint32_t a, uint32_t b) { return Bits(values[a]) > Bits(values[b]); });
  indices.resize(std::min(selected, indices.size()));
  std::sort(indices.begin(), indices.end());
  return indices;
}

void CheckLargest(const std::vector<float>& values) {
  for (const size_t selected : {size_t{0}, size_t{1}, values.size() / 1000, values.size() / 100,
                                values.size() / 3, values.size(), values.size() + 1}) {
    EXPECT(SelectLargest(Of(values), selected) == Sorted(values, selected));
  }
}

void CheckKinds() {
  for (const size_t count : {size_t{0}, size_t{1}, size_t{7}, size_t{1000}, size_t{100003}}) {
    CheckLargest(Normal(count, 1));
  }
  std::vector<float> values = Normal(60000, 2);
  for (float& value : values) value = std::round(value);  // many are equal
  CheckLargest(values);
  CheckLargest(std::vector<float>(5000, 0.0f));
  CheckLargest(std::vector<float>(50000, -1.5f));
  std::vector<float> few(100000, 0.0f);
  for (size_t i = 0; i < few.size(); i += 997) few[i] = static_cast<float>(i) - 50000;
  CheckLargest(few);
  std::vector<float> broken = Normal(30000, 3);
  broken[17] = kNan;
  broken[29999] = -kInfinite;
  broken[12345] = kInfinite;
  CheckLargest(broken);
  EXPECT((SelectLargest(Of(broken), 3) == std::vector<uint32_t>{17, 12345, 29999}));
}

// The sampled positions hold large values, or none of them.
void CheckMisleading() {
  for (const bool large : {true, false}) {
    std::vector<float> values(size_t{16} << 14, large ? 0.5f : 2.0f);
    for (size_t i = 0; i < size_t{16} << 10; ++i) {
      values[16 * i + i * 0x9e3779b1u % 16] = large ? 3.0f : 0.1f;
    }
    CheckLargest(values);
  }
}

void CheckKept() {
  const size_t count = 50001, selected = 500;
  const std::vector<float> in = Normal(count, 4), before = Normal(count, 5), old = Normal(count, 6);
  std::vector<float> error = before, sums(count);
  for (size_t i = 0; i < count; ++i) sums[i] = before[i] + 0.5f * in[i];
  Candidates candidates{in.data(), error.data(), nullptr, count, 0.5f, 0};
  EXPECT(SelectLargest(candidates, selected) == Sorted(sums, selected));
  EXPECT(error == sums);

  error = before;
  std::vector<float> momentum = old, averages(count);
  for (size_t i = 0; i < count; ++i) {
    averages[i] = 0.75f * old[i] + 2 * in[i];
    sums[i] = before[i] + averages[i];
  }
  candidates = {in.data(), error.data(), momentum.data(), count, 2, 0.75f};
  const std::vector<uint32_t> chosen = SelectLargest(candidates, selected);
  double apart = 0;
  for (size_t i = 0; i < count; ++i) {
    apart = std::max(
        {apart, std::abs(double{momentum[i]} - averages[i]), std::abs(double{error[i]} - sums[i])});
  }
  EXPECT(apart < 1e-5);
  EXPECT(chosen == Sorted(error, selected));
  EXPECT(SelectLargest({in.data(), error.data(), nullptr, count, 0, 0}, 0).empty());
}

void CheckAbove() {
  const std::vector<float> values = Normal(70001, 7);
  std::vector<uint32_t> expected;
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::abs(values[i]) >= 2) expected.push_back(static_cast<uint32_t>(i));
  }
  EXPECT(SelectAbove(Of(values), 2) == expected);
  EXPECT(SelectAbove(Of(values), 100).empty());
  for (const float threshold : {0.0f, -1.0f, kNan}) {
    try {
      SelectAbove(Of(values), threshold);
      EXPECT(false);
    } catch (const Error& error) { EXPECT(error.code() == Code::kInvalidArgument); }
  }
}

void CheckUnits() {
  const std::vector<float> in = Normal(kPassValues - 5, 8);
  const auto run = [&in](auto pass) {
    std::vector<float> error = Normal(in.size(), 9), momentum = Normal(in.size(), 10);
    std::vector<uint32_t> found(in.size());
    const Candidates candidates{in.data(), error.data(), momentum.data(), in.size(), 1, 0.5f};
    found.resize(pass(Pass{candidates, 0, in.size(), true, 1.5f, found.data()}));
    return found;
  };
  const std::vector<uint32_t> baseline = run(PassOnBaseline);
  EXPECT(baseline.size() > 100);
#if defined(__x86_64__)
  const VectorUnit unit = FindVectorUnit();
  if (unit != VectorUnit::kBaseline) EXPECT(run(PassOnAvx2) == baseline);
  if (unit == VectorUnit::kAvx512) EXPECT(run(PassOnAvx512) == baseline);
#endif
}

}  // namespace
}  // namespace tfdist::testing

int main() {
  using namespace tfdist::testing;
  try {
    CheckKinds();
    CheckMisleading();
    CheckKept();
    CheckAbove();
    CheckUnits();
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return 1;
  }
  std::printf("ok\n");
}
