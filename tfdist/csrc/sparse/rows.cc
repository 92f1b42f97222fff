#include "sparse/rows.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "error.h"
#include "float_mode.h"

namespace tfdist {
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
  // What is not finite has shown, for it is selected first; no step after this one needs more.
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
  // Rows of one rank rise, so the tensor of one is mostly that of the one before.
  size_t at = 0;
  for (size_t r = 0; r < count; ++r) {
    const int64_t index = rows[r].index;
    if (index < 0 || index >= end) {
      throw Error(Code::kInvalidArgument, "A sparse gradient has a value at index " +
                                              std::to_string(index) + " of " +
                                              std::to_string(end) + ".");
    }
    const auto begin = [&] { return at == 0 ? 0 : ends[at - 1]; };
    while (index >= ends[at]) ++at;
    while (index < begin()) --at;
    tensors[at].values[index - begin()] += rows[r].value;
  }
}

}  // namespace tfdist
