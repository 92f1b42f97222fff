// Measures copies between each pair of GPUs. Each process opens the memory of the other processes.
#include <algorithm>
#include <string>

#include "error.h"
#include "rank.h"
#include "timing.h"

namespace tfdist::benchmark {
namespace {

constexpr size_t kMax = size_t{64} << 20;

// The GPU `reader` reads the memory of the GPU `owner`. If `both` is set, `owner` reads the memory
// of `reader` at the same time.
struct Pair {
  size_t reader, owner;
  bool both;
};

}  // namespace

void MeasureCopies(Rank& rank) {
  const auto ranks = static_cast<size_t>(rank.task.ranks), own = static_cast<size_t>(rank.number);
  const size_t bytes = std::min(kMax, rank.task.largest());
  const std::vector<cuda::IpcHandle> handles = rank.Gather(rank.memory.Share());
  std::vector<std::unique_ptr<PeerMemory>> peers(ranks);
  std::vector<double> closed(ranks * ranks);
  for (size_t owner = 0; owner < ranks; ++owner) {
    if (owner == own) continue;
    try {
      peers[owner] = std::make_unique<PeerMemory>(rank.gpu, handles[owner]);
    } catch (const Error&) { closed[own * ranks + owner] = 1; }
  }
  closed = rank.Slowest(closed);
  std::vector<Pair> pairs;
  for (size_t a = 0; a < ranks; ++a) {
    for (size_t b = 0; b < ranks; ++b) {
      if (a == b) continue;
      const bool from_b = closed[a * ranks + b] == 0, from_a = closed[b * ranks + a] == 0;
      if (from_b) pairs.push_back({a, b, false});
      if (a < b && from_a && from_b) pairs.push_back({a, b, true});
      if (!from_b) {
        rank.Say("{\"missing\": \"copy\", \"why\": \"GPU " + std::to_string(a) +
                 " cannot open the memory of GPU " + std::to_string(b) + "\"}");
      }
    }
  }
  std::vector<std::vector<double>> seconds(pairs.size());
  for (int round = -1; round < rank.task.rounds; ++round) {
    for (size_t i = 0; i < pairs.size(); ++i) {
      const auto [reader, owner, both] = pairs[i];
      const bool reads = own == reader || (both && own == owner);
      rank.Meet();
      const double start = Now();
      if (reads) {
        const PeerMemory& from = *peers[own == reader ? owner : reader];
        for (int n = 0; n < Times(bytes); ++n) {
          rank.stream.Copy(rank.other.address(), from.address(), bytes);
        }
        rank.Finish();
      }
      if (round >= 0) seconds[i].push_back(reads ? (Now() - start) / Times(bytes) : 0);
    }
  }
  for (size_t i = 0; i < pairs.size(); ++i) {
    const auto [reader, owner, both] = pairs[i];
    rank.Report("\"figure\": \"" + std::string(both ? "copies both ways" : "copy") +
                    "\", \"reader\": " + std::to_string(reader) + ", \"owner\": " +
                    std::to_string(owner) + ", \"bytes\": " + std::to_string(bytes),
                seconds[i]);
  }
  rank.Meet();  // All ranks must have finished before any rank frees its memory.
}

}  // namespace tfdist::benchmark
