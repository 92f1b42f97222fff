// Results do not depend on the floating-point modes of threads, and the mean of equal values is
// that value.
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "cpp/calls.h"
#include "reduce/half.h"
#include "vector_unit.h"

namespace tfdist::testing {
namespace {

template <typename T>
std::vector<T> Reduced(Communicator& group, DType type, ReduceOp op, const std::vector<T>& values) {
  std::vector<T> out(values.size());
  const size_t bytes = values.size() * sizeof(T);
  Operation operation;
  operation.fingerprint.kind = Kind::kAllReduce;
  operation.fingerprint.type = type;
  operation.fingerprint.op = op;
  operation.fingerprint.AddShape({static_cast<int64_t>(values.size())});
  operation.in = ConstBufferList(reinterpret_cast<const char*>(values.data()), bytes);
  operation.out = BufferList(reinterpret_cast<char*>(out.data()), bytes);
  group.Run(std::move(operation));
  return out;
}

void MeansOfEqualValues(int ranks, int hosts, const std::string& algorithm) {
  Plan plan;
  plan.ranks = ranks;
  plan.hosts = hosts;
  plan.algorithm = algorithm;
  std::mt19937 bits(1);
  std::uniform_real_distribution<float> any(-3.0f, 3.0f);
  for (const size_t count : {size_t{37}, size_t{20'001}}) {
    std::vector<float> values(count);
    for (float& value : values) value = any(bits);
    OnEachRank(plan, [&](Communicator& group) {
      EXPECT(Reduced(group, DType::kFloat32, ReduceOp::kMean, values) == values);
    });
  }
}

// Sets this thread's mode as a library built with -ffast-math does.
void FlushDenormals() {
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040);
#elif defined(__aarch64__)
  __asm__ __volatile__("msr fpcr, %0" : : "r"(uint64_t{1} << 24));
#endif
}

void DenormalHalves(int hosts) {
  Plan plan;
  plan.hosts = hosts;
  OnEachRank(plan, [](Communicator& group) {
    if (group.rank() == 0) FlushDenormals();
    const std::vector<uint16_t> tiny(9, 3), twice(9, 6);  // denormal float16
    EXPECT(Reduced(group, DType::kFloat16, ReduceOp::kSum, tiny) == twice);
    const uint32_t smallest = 1;  // denormal float32
    std::vector<float> values(5), sums(5);
    for (float& value : values) std::memcpy(&value, &smallest, sizeof(value));
    const std::vector<float> total = Reduced(group, DType::kFloat32, ReduceOp::kSum, values);
    uint32_t sum;
    std::memcpy(&sum, total.data(), sizeof(sum));
    EXPECT(sum == 2);
  });
}

}  // namespace
}  // namespace tfdist::testing

int main() {
  using namespace tfdist::testing;
  return Report([] {
    for (const int ranks : {2, 3, 5, 6, 7, 11, 23}) {
      for (const int hosts : {1, 2, ranks}) MeansOfEqualValues(ranks, hosts, "");
    }
    for (const char* algorithm : {"two_shot", "ring", "one_shot", "hierarchical"}) {
      MeansOfEqualValues(7, 3, algorithm);
    }
    for (const int hosts : {1, 2}) DenormalHalves(hosts);
  });
}
