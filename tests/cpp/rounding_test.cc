// Sums of half types are rounded once, regardless of the arrangement and the algorithm.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "cpp/ranks.h"
#include "reduce/half.h"

namespace tfdist::testing {
namespace {

template <typename Half>
std::vector<Half> Filled(size_t count, float value) {
  Half half;
  FromFloat(value, &half);
  return std::vector<Half>(count, half);
}

template <typename Half>
void CheckReduced(const Plan& plan, DType type, ReduceOp op, const std::vector<float>& given,
                  float expected) {
  for (const size_t count : {size_t{1}, size_t{7}, size_t{100001}}) {
    OnEachRank(plan, [&](Communicator& group) {
      const auto in = Filled<Half>(count, given[static_cast<size_t>(group.rank())]);
      auto out = Filled<Half>(count, -1);
      Operation operation;
      operation.fingerprint.kind = Kind::kAllReduce;
      operation.fingerprint.type = type;
      operation.fingerprint.op = op;
      operation.fingerprint.AddShape({static_cast<int64_t>(count)});
      operation.in = ConstBufferList(reinterpret_cast<const char*>(in.data()), 2 * count);
      operation.out = BufferList(reinterpret_cast<char*>(out.data()), 2 * count);
      group.Run(std::move(operation));
      for (const Half value : out) EXPECT(ToFloat(value) == expected);
    });
  }
}

void CheckPlan(const Plan& plan) {
  // 2049 is not a float16, and 257 not a bfloat16; 160000 exceeds float16.
  CheckReduced<Float16>(plan, DType::kFloat16, ReduceOp::kSum, {2048, 1, 1, 0}, 2050);
  CheckReduced<Bfloat16>(plan, DType::kBfloat16, ReduceOp::kSum, {256, 1, 1, 0}, 258);
  CheckReduced<Float16>(plan, DType::kFloat16, ReduceOp::kMean, {4e4, 4e4, 4e4, 4e4}, 4e4);
  CheckReduced<Float16>(plan, DType::kFloat16, ReduceOp::kProduct, {320, 256, 1, 0.5}, 40960);
  CheckReduced<Float16>(plan, DType::kFloat16, ReduceOp::kMax, {3, 300, 1, -9}, 300);
}

}  // namespace
}  // namespace tfdist::testing

int main() {
  using namespace tfdist::testing;
  try {
    for (const char* algorithm : {"", "two_shot", "ring", "one_shot", "hierarchical"}) {
      for (const int hosts : {1, 2, 3, 4}) {
        Plan plan;
        plan.ranks = 4;
        plan.hosts = hosts;
        plan.algorithm = algorithm;
        CheckPlan(plan);
      }
      std::printf("rounding by '%s': ok\n", algorithm);
    }
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return 1;
  }
}
