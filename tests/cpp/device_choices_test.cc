// Decisions before a launch: which transport is faster, and which tensors are fused.
#include <map>
#include <numeric>
#include <vector>

#include "cpp/calls.h"
#include "device/fusion.h"
#include "device/stream_waits.h"

namespace tfdist::testing {
namespace {

using Seconds = std::function<double(bool first, size_t bytes)>;

// Args: tried: counts the trials of each size, if not null.
size_t Found(const Seconds& seconds, std::map<size_t, int>* tried = nullptr) {
  return WhereFirstIsFaster(
      [&](bool first, size_t bytes) {
        if (tried) ++(*tried)[bytes];
        return seconds(first, bytes);
      },
      [](const std::vector<double>& own) { return own; });
}

void Measuring() {
  const std::vector<size_t> sizes = TriedSizes();
  EXPECT(Found([](bool first, size_t) { return first ? 2.0 : 1.0; }) == 0);
  EXPECT(Found([](bool first, size_t) { return first ? 1.0 : 2.0; }) >= sizes.back());
  // Faster up to 64 KiB; 256 KiB is closer to the other side.
  const auto crossing = [](bool first, size_t bytes) {
    return first ? static_cast<double>(bytes) : 100e3;
  };
  std::map<size_t, int> tried;
  const size_t most = Found(crossing, &tried);
  EXPECT(most >= (64 << 10) && most < (256 << 10));
  EXPECT(tried.begin()->first == sizes.front());
  EXPECT(tried.rbegin()->first == 256 << 10);  // Twice as slow, so larger sizes are not tried.
  // The slowest rank counts, and so does the first rank to reach the time limit.
  const size_t slow = WhereFirstIsFaster([](bool first, size_t) { return first ? 1.0 : 2.0; },
                                         [&sizes](const std::vector<double>& own) {
                                           static size_t rounds = 0;
                                           std::vector<double> all = own;
                                           if (++rounds == 2) all[2] = 1e9;
                                           EXPECT(rounds <= 2 && !sizes.empty());
                                           return all;
                                         });
  EXPECT(slow >= sizes[1] && slow < sizes[2]);
}

std::vector<KernelAllReduce::Tensor> Tensors(const std::vector<size_t>& bytes) {
  std::vector<KernelAllReduce::Tensor> tensors;
  for (const size_t each : bytes) {
    tensors.push_back({tensors.size() * (size_t{1} << 30), 7 + tensors.size(), each});
  }
  return tensors;
}

void Fusing() {
  constexpr size_t kBuffer = 1 << 16;
  // A single tensor, or one as large as the buffer, is not fused.
  EXPECT(Fuse(Tensors({100}), kBuffer).lists.empty());
  EXPECT(Fuse(Tensors({100}), kBuffer).alone.size() == 1);
  const Fused mixed = Fuse(Tensors({100, kBuffer, 4, 17}), kBuffer);
  EXPECT(mixed.alone.size() == 1 && mixed.alone[0].bytes == kBuffer);
  EXPECT(mixed.lists.size() == 1 && mixed.lists[0].count == 3);
  EXPECT(mixed.lists[0].vectors == 7 + 1 + 2);
  EXPECT(mixed.lists[0].spans[2].begin == 8);
  // Each tensor is in exactly one list, and each list fits the buffer.
  const std::vector<size_t> many(300, 1000);
  const Fused fused = Fuse(Tensors(many), kBuffer);
  size_t bytes = 0;
  for (const device::List& list : fused.lists) {
    EXPECT(list.vectors * device::kVectorBytes <= kBuffer);
    for (uint32_t i = 0; i < list.count; ++i) bytes += list.spans[i].bytes;
  }
  for (const auto& tensor : fused.alone) bytes += tensor.bytes;
  EXPECT(bytes == std::accumulate(many.begin(), many.end(), size_t{0}));
  // Tensors of one megabyte are not fused, regardless of the buffer size.
  EXPECT(Fuse(Tensors({1 << 20, 1 << 20}), size_t{8} << 20).alone.size() == 2);
}

}  // namespace
}  // namespace tfdist::testing

int main() {
  using namespace tfdist::testing;
  return Report([] {
    Measuring();
    Fusing();
  });
}
