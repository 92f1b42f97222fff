// Ranks that wait for another rank do not occupy the cores that it needs.
#include <sys/resource.h>

#include <chrono>
#include <thread>
#include <vector>

#include "cpp/calls.h"
#include "cpp/ranks.h"

namespace tfdist::testing {
namespace {

// Per second. Covers the spinning before a wait sleeps, its periodic wake-ups, and the ticks of
// watching threads.
constexpr double kMaxSwitches = 2000;

long Switches() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_nvcsw;
}

void TwoWaitForAThird(int hosts) {
  Plan plan;
  plan.ranks = 3;
  plan.hosts = hosts;
  OnEachRank(plan, [](Communicator& group) {
    std::vector<float> values(10, 1.0f);
    const size_t bytes = values.size() * sizeof(float);
    Operation operation;
    operation.fingerprint.kind = Kind::kAllReduce;
    operation.fingerprint.type = DType::kFloat32;
    operation.fingerprint.AddShape({10});
    operation.in = ConstBufferList(reinterpret_cast<char*>(values.data()), bytes);
    operation.out = BufferList(reinterpret_cast<char*>(values.data()), bytes);
    if (group.rank() == 2) {
      using Clock = std::chrono::steady_clock;
      const long before = Switches();
      const auto begin = Clock::now();
      std::this_thread::sleep_for(std::chrono::seconds(1));
      const std::chrono::duration<double> slept = Clock::now() - begin;
      EXPECT(Switches() - before < kMaxSwitches * slept.count());
    }
    group.Run(std::move(operation));
    EXPECT(values[0] == 3.0f);
  });
}

}  // namespace
}  // namespace tfdist::testing

int main() {
  using namespace tfdist::testing;
  return Report([] {
    for (const int hosts : {1, 3}) TwoWaitForAThird(hosts);
  });
}
