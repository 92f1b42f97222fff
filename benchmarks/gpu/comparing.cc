#include "comparing.h"

#include <cstdio>

#include "timing.h"

namespace tfdist::benchmark {

void Print(const Figure& figure, double seconds, bool failed) {
  std::printf("{\"figure\": \"%s\", \"bytes\": %zu, \"beside\": \"%s\", \"seconds\": %.9f%s}\n",
              figure.name.c_str(), figure.bytes, figure.beside.c_str(), seconds,
              failed ? ", \"failed\": true" : "");
}

void Compare(const DeviceStream& stream, const std::vector<Timed>& all, int rounds, int times) {
  std::vector<std::vector<double>> seconds(all.size());
  for (int round = -1; round < rounds; ++round) {
    for (size_t i = 0; i < all.size(); ++i) {
      const double start = Now();
      for (int n = 0; n < times; ++n) all[i].launch();
      stream.Synchronize();
      if (round >= 0) seconds[i].push_back((Now() - start) / times);
    }
  }
  for (size_t i = 0; i < all.size(); ++i) Print(all[i].figure, Median(seconds[i]));
}

}  // namespace tfdist::benchmark
