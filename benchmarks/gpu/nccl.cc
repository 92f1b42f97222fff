// Measures NCCL's collectives without tfdist, and messages from each rank to the next one in a
// ring. Several collectives are added to a stream before the program waits for them.
#include <algorithm>
#include <functional>
#include <string>

#include "device/nccl_group.h"
#include "rank.h"
#include "timing.h"

namespace tfdist::benchmark {
namespace {

constexpr DType kType = DType::kFloat32;
constexpr double kSeconds = 120;
constexpr size_t kVector = 16;

struct Call {
  const char* name;
  // Takes the number of elements of each rank's part, and adds the collective to the stream.
  std::function<void(size_t part)> launch;
};

}  // namespace

void MeasureNccl(Rank& rank) {
  const std::vector<std::string> ways = rank.ways();
  if (std::find(ways.begin(), ways.end(), "nccl") == ways.end()) return;
  const int ranks = rank.task.ranks, own = rank.number;
  const nccl::UniqueId id = rank.Gather(own == 0 ? NcclGroup::NewId() : nccl::UniqueId{})[0];
  NcclGroup group({&rank.gpu, id, own, ranks, kSeconds});
  const cuda::Address data = rank.memory.address(), other = rank.other.address();
  const auto stream = rank.stream.get();
  const auto place = [&](size_t part) { return data + static_cast<size_t>(own) * part * 4; };
  const auto whole = [&](size_t part) { return part * static_cast<size_t>(ranks); };
  const Call calls[] = {
      {"all-reduce",
       [&](size_t part) {
         group.AllReduce(data, data, whole(part), kType, ReduceOp::kSum, stream);
       }},
      {"reduce-scatter",
       [&](size_t part) {
         group.ReduceScatter(data, place(part), part, kType, ReduceOp::kSum, stream);
       }},
      {"all-gather", [&](size_t part) { group.AllGather(place(part), data, part, kType, stream); }},
      {"broadcast",
       [&](size_t part) { group.Broadcast(data, data, whole(part), kType, 0, stream); }},
      {"send and receive", [&](size_t part) {
         group.Grouped([&] {
           group.Send(data, whole(part), kType, (own + 1) % ranks, stream);
           group.Recv(other, whole(part), kType, (own + ranks - 1) % ranks, stream);
         });
       }}};
  for (const size_t bytes : rank.task.sizes) {
    // As in nccl-tests, the part of each rank consists of whole vectors.
    const size_t vectors = bytes / static_cast<size_t>(ranks) / kVector;
    const size_t part = std::max<size_t>(vectors, 1) * kVector / 4;
    std::map<std::string, std::vector<double>> seconds;
    for (int round = -1; round < rank.task.rounds; ++round) {
      for (const Call& call : calls) {
        rank.Meet();
        const double start = Now();
        for (int n = 0; n < Times(bytes); ++n) call.launch(part);
        rank.Finish([&] { group.Poll(); });
        if (round >= 0) seconds[call.name].push_back((Now() - start) / Times(bytes));
      }
    }
    for (const Call& call : calls) {
      rank.Report("\"figure\": \"" + std::string(call.name) +
                      " of NCCL\", \"bytes\": " + std::to_string(whole(part) * 4),
                  seconds[call.name]);
    }
  }
}

}  // namespace tfdist::benchmark
