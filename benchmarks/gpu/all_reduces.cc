// Measures the all-reduces of a job's communicator, in each of the ways in `kWays`.
#include <string>

#include "rank.h"
#include "timing.h"

namespace tfdist::benchmark {

void MeasureAllReduces(Rank& rank) {
  const std::vector<std::string> ways = rank.ways();
  for (const size_t bytes : rank.task.sizes) {
    std::map<std::string, std::vector<double>> seconds;
    for (int round = -1; round < rank.task.rounds; ++round) {
      for (const std::string& way : ways) {
        rank.Meet();
        const double start = Now();
        for (int n = 0; n < Times(bytes); ++n) rank.AllReduce(way, bytes);
        if (round >= 0) seconds[way].push_back((Now() - start) / Times(bytes));
      }
    }
    for (const std::string& way : ways) {
      rank.Report("\"figure\": \"all-reduce\", \"way\": \"" + way +
                      "\", \"bytes\": " + std::to_string(bytes),
                  seconds[way]);
    }
  }
}

}  // namespace tfdist::benchmark
