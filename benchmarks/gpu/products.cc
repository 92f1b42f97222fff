// Measures the product kernel alone, and then together with all-reduces. The difference shows how
// much of the GPU the all-reduces use.
#include <algorithm>
#include <set>
#include <string>

#include "product.h"
#include "rank.h"
#include "timing.h"

namespace tfdist::benchmark {
namespace {

constexpr size_t kSmall = size_t{64} << 10, kLarge = size_t{16} << 20;
// The all-reduces must take longer than the product, by the factor `kLonger`. But there are at most
// `kMax` all-reduces.
constexpr double kLonger = 1.5, kMax = 10000;

}  // namespace

void MeasureProducts(Rank& rank) {
  Product product(rank.gpu);
  const std::vector<std::string> ways = rank.ways();
  for (const size_t bytes : std::set<size_t>{std::min(kSmall, rank.task.largest()),
                                             std::min(kLarge, rank.task.largest())}) {
    const auto reduce = [&](const std::string& way, int times) {
      for (int n = 0; n < times; ++n) rank.AllReduce(way, bytes);
    };
    product.Time();
    const double alone = product.Time();
    std::map<std::string, int> times;  // The same values on all ranks.
    for (const std::string& way : ways) {
      rank.Meet();
      const double start = Now();
      reduce(way, Times(bytes));
      const double one = (Now() - start) / Times(bytes);
      const double enough = rank.Slowest({kLonger * alone / one})[0];
      times[way] = static_cast<int>(std::clamp(enough, 1.0, kMax));
    }
    std::map<std::string, std::vector<double>> seconds;
    for (int round = -1; round < rank.task.rounds; ++round) {
      rank.Meet();
      const double without = product.Time();
      if (round >= 0) seconds["nothing"].push_back(without);
      for (const std::string& way : ways) {
        rank.Meet();
        const double beside = product.Time([&] { reduce(way, times[way]); });
        if (round >= 0) seconds[way].push_back(beside);
      }
    }
    const auto report = [&](const std::string& beside) {
      rank.Report("\"figure\": \"product\", \"beside\": \"" + beside +
                      "\", \"bytes\": " + std::to_string(bytes),
                  seconds[beside]);
    };
    report("nothing");
    for (const std::string& way : ways) report(way);
  }
}

}  // namespace tfdist::benchmark
