#include "sparse/select.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <utility>

#include "error.h"
#include "sparse/units.h"
#include "vector_unit.h"

namespace tfdist {
namespace {

#include "sparse/arithmetic.inc"

constexpr size_t kSamples = 16 << 10;

using Run = size_t (*)(const Pass&);

Run Choose() {
#if defined(__x86_64__)
  switch (FindVectorUnit()) {
    case VectorUnit::kAvx512:
      return PassOnAvx512;
    case VectorUnit::kAvx2:
      return PassOnAvx2;
    case VectorUnit::kBaseline:
      break;
  }
#endif
  return PassOnBaseline;
}

uint32_t Magnitude(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits & 0x7fffffff;
}

float FromMagnitude(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

std::vector<uint32_t> RunPasses(const Candidates& candidates, bool accumulates, float threshold) {
  static const Run run = Choose();
  std::vector<uint32_t> found, some(kPassValues);
  for (size_t begin = 0; begin < candidates.count; begin += kPassValues) {
    const size_t count = std::min(kPassValues, candidates.count - begin);
    const size_t more = run({candidates, begin, count, accumulates, threshold, some.data()});
    found.insert(found.end(), some.begin(), some.begin() + static_cast<std::ptrdiff_t>(more));
  }
  return found;
}

// Returns the magnitude that candidate i will have when `error` and `momentum` have been updated.
uint32_t Expected(const Candidates& c, size_t i) {
  if (!c.error) return Magnitude(c.Value(i));
  const float in = c.scale * c.in[i];
  return Magnitude(c.error[i] + (c.momentum ? NextMomentum(c.momentum[i], c.factor, in) : in));
}

// Estimates a threshold from a sample of the candidates. With high probability, at least `selected`
// candidates reach this threshold, but not many more. Source of the idea: Lin et al., "Deep
// gradient compression", 2018 (hierarchical sampling).
float Estimate(const Candidates& candidates, size_t selected) {
  const size_t samples = std::min(candidates.count, kSamples);
  std::vector<uint32_t> magnitudes(samples);
  for (size_t i = 0; i < samples; ++i) {
    // Divide the candidates into `samples` ranges of almost equal length, and take one candidate
    // from each range. Its position in the range varies, so that a regular pattern in the values
    // does not distort the sample.
    const size_t begin = i * candidates.count / samples;
    const size_t length = (i + 1) * candidates.count / samples - begin;
    magnitudes[i] = Expected(candidates, begin + i * 0x9e3779b1u % length);
  }
  const double mean = static_cast<double>(selected) * static_cast<double>(samples) /
                      static_cast<double>(candidates.count);
  const double rank = samples == candidates.count ? mean : mean + 4 * std::sqrt(mean) + 4;
  const size_t place = std::min(static_cast<size_t>(rank), samples - 1);
  const auto chosen = magnitudes.begin() + static_cast<std::ptrdiff_t>(place);
  std::nth_element(magnitudes.begin(), chosen, magnitudes.end(), std::greater<>());
  return FromMagnitude(std::max(*chosen, 1u));
}

// Keeps the indices of the `selected` candidates with the largest magnitudes, and removes all
// others. If candidates have equal magnitudes, keeps the first ones.
void KeepLargest(const Candidates& candidates, size_t selected, std::vector<uint32_t>* indices) {
  std::vector<uint32_t> magnitudes;
  magnitudes.reserve(indices->size());
  for (const uint32_t index : *indices) magnitudes.push_back(Magnitude(candidates.Value(index)));
  const auto last = magnitudes.begin() + static_cast<std::ptrdiff_t>(selected - 1);
  std::nth_element(magnitudes.begin(), last, magnitudes.end(), std::greater<>());
  const uint32_t smallest = *last;
  auto equal = std::count(magnitudes.begin(), last + 1, smallest);
  const auto dropped = [&](uint32_t index) {
    const uint32_t magnitude = Magnitude(candidates.Value(index));
    return magnitude < smallest || (magnitude == smallest && equal-- <= 0);
  };
  // `dropped` counts the candidates with the smallest magnitude, so it must be called exactly once
  // for each index, in order. std::remove_if does not guarantee this order, so it cannot be used
  // here.
  auto end = indices->begin();
  for (const uint32_t index : *indices) {
    if (!dropped(index)) *end++ = index;
  }
  indices->erase(end, indices->end());
}

// Adds the indices of the first candidates that are zero, until there are `selected` indices. The
// result is in ascending order.
// Args: indices: the indices of all candidates that are not zero, in ascending order.
void FillWithZeros(const Candidates& candidates, size_t selected, std::vector<uint32_t>* indices) {
  std::vector<uint32_t> all;
  all.reserve(selected);
  size_t zeros = selected - indices->size();
  auto next = indices->begin();
  for (size_t i = 0; i < candidates.count && all.size() < selected; ++i) {
    if (next != indices->end() && *next == i) {
      all.push_back(*next++);
    } else if (zeros > 0) {
      all.push_back(static_cast<uint32_t>(i));
      --zeros;
    }
  }
  *indices = std::move(all);
}

void Check(const Candidates& candidates) {
  if (candidates.count >= kMaxCandidates) {
    throw Error(Code::kInvalidArgument,
                "A sparse gradient's tensor must have fewer than 2^31 values. Received: " +
                    std::to_string(candidates.count) + ".");
  }
}

}  // namespace

void CheckThreshold(float threshold) {
  if (threshold > 0) return;
  throw Error(Code::kInvalidArgument,
              "A threshold must be positive. Received: " + std::to_string(threshold) + ".");
}

std::vector<uint32_t> SelectLargest(const Candidates& candidates, size_t selected) {
  const FloatMode mode;
  Check(candidates);
  selected = std::min(selected, candidates.count);
  if (selected == 0) {
    RunPasses(candidates, true, std::numeric_limits<float>::infinity());
    return {};
  }
  const float threshold = Estimate(candidates, selected);
  std::vector<uint32_t> indices = RunPasses(candidates, true, threshold);
  if (indices.size() < selected && Magnitude(threshold) > 1) {
    // The estimated threshold is too high, because the sample was not representative. Select all
    // candidates that are not zero instead.
    indices = RunPasses(candidates, false, FromMagnitude(1));
  }
  if (indices.size() < selected) {
    FillWithZeros(candidates, selected, &indices);
  } else {
    KeepLargest(candidates, selected, &indices);
  }
  return indices;
}

std::vector<uint32_t> SelectAbove(const Candidates& candidates, float threshold) {
  const FloatMode mode;
  Check(candidates);
  CheckThreshold(threshold);
  return RunPasses(candidates, true, threshold);
}

namespace {

void Forget(float* values, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (!std::isfinite(values[i])) values[i] = 0;
  }
}

}  // namespace

void TakeRows(const Candidates& candidates, const std::vector<uint32_t>& indices, int32_t first,
              Row* rows) {
  const FloatMode mode;
  bool finite = true;
  for (const uint32_t index : indices) {
    const float value = candidates.Value(index);
    *rows++ = {first + static_cast<int32_t>(index), value};
    finite = finite && std::isfinite(value);
    if (candidates.error) candidates.error[index] = 0;
    if (candidates.momentum) candidates.momentum[index] = 0;
  }
  // Infinities and NaNs are selected before other values, so the sum of this step is already
  // infinite or NaN. If any of them remained in the residual, they would spoil the sums of later
  // steps as well.
  if (!finite && candidates.error) Forget(candidates.error, candidates.count);
  if (!finite && candidates.momentum) Forget(candidates.momentum, candidates.count);
}

void SumRows(const Row* rows, size_t count, const std::vector<RowSums>& tensors) {
  const FloatMode mode;
  std::vector<int64_t> ends;
  int64_t end = 0;
  for (const RowSums& tensor : tensors) {
    std::fill_n(tensor.values, tensor.count, 0.0f);
    ends.push_back(end += static_cast<int64_t>(tensor.count));
  }
  // The rows of a rank have ascending indices, so a row usually belongs to the same tensor as the
  // previous row, or to the next one. The search for the row's tensor therefore begins at the
  // tensor of the previous row.
  size_t at = 0;
  for (size_t r = 0; r < count; ++r) {
    const int64_t index = rows[r].index;
    if (index < 0 || index >= end) {
      throw Error(Code::kInvalidArgument, "A sparse gradient has a value at index " +
                                              std::to_string(index) + " of " + std::to_string(end) +
                                              ".");
    }
    const auto begin = [&] { return at == 0 ? 0 : ends[at - 1]; };
    while (index >= ends[at]) ++at;
    while (index < begin()) --at;
    tensors[at].values[index - begin()] += rows[r].value;
  }
}

}  // namespace tfdist
