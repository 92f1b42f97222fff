#include "collective/transfer.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "reduce/reduce.h"

namespace tfdist {

size_t Transfer::Begin(int j) const {
  return std::accumulate(part_bytes.begin(), part_bytes.begin() + j, size_t{0});
}

void ReducePart(const Transfer& t, int me, size_t begin, size_t bytes,
                const std::vector<const char*>& others) {
  const DType out_type = t.widens ? PartialType(t.type, t.op) : t.type;
  const size_t element = SizeOf(t.type), wider = SizeOf(out_type) / element;
  const size_t in_begin = t.InBegin(me) + begin, out_begin = t.OutBegin(me) + begin * wider;
  std::vector<const void*> inputs(others.size());
  for (size_t done = 0; done < bytes;) {
    const auto in = t.in.At(in_begin + done);
    const auto out = t.out.At(out_begin + done * wider);
    const size_t some = std::min({in.bytes, out.bytes / wider, bytes - done});
    for (size_t j = 0; j < others.size(); ++j) {
      inputs[j] = j == static_cast<size_t>(me) ? in.data : others[j] + done;
    }
    Reduce({t.type, t.op, t.divisor, inputs.data(), static_cast<int>(inputs.size()), some / element,
            out.data, out_type});
    done += some;
  }
}

void CopyPart(const Transfer& t, int me, size_t begin, size_t bytes) {
  size_t at = t.OutBegin(me) + begin;
  t.in.ForEach(t.InBegin(me) + begin, bytes, [&](const char* from, size_t some) {
    t.out.ForEach(at, some, [&](char* to, size_t stretch) {
      if (to != from) std::memmove(to, from, stretch);
      from += stretch;
    });
    at += some;
  });
}

std::vector<size_t> CutEvenly(size_t bytes, size_t element, int owners, int participants) {
  const size_t elements = bytes / element;
  const auto n = static_cast<size_t>(owners);
  std::vector<size_t> parts(static_cast<size_t>(participants), 0);
  for (size_t j = 0; j < n; ++j) {
    parts[j] = (elements * (j + 1) / n - elements * j / n) * element;
  }
  return parts;
}

}  // namespace tfdist
