// Usage: compressed_test [quick]
//
// All-reduces that send encoded values: all ranks get the same bits, the errors hold all losses,
// and the codec's number of bytes is sent.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

#include "cpp/calls.h"

namespace tfdist::testing {
namespace {

float Value(int rank, size_t i) {
  return std::sin(static_cast<float>(i) * 0.7f + static_cast<float>(rank)) +
         0.01f * static_cast<float>(rank);
}

struct Case {
  const char* name;
  Codec codec;
  float bound;  // of an encoding's error, relative to the largest magnitude; 0 if unknown
};

std::vector<Case> Cases() {
  Codec half, int8, ternary, means, votes;
  half.encoding = Encoding::kHalf;
  ternary.bits = 2;
  ternary.stochastic = true;
  ternary.block = 1024;
  means.encoding = Encoding::kTwoMeans;
  votes.encoding = Encoding::kSigns;
  votes.unit = true;
  return {{"half", half, 0x1p-11f},
          {"int8", int8, 0.5f / 127},
          {"ternary", ternary, 1},
          {"means", means, 0},
          {"votes", votes, 0}};
}

struct Brought {
  std::vector<float> in, out, error;
};

// Three tensors, one of them empty.
template <typename P, typename T>
P Cut(std::vector<T>& values) {
  const size_t cut = values.size() / 3;
  using Byte = std::remove_pointer_t<decltype(P().At(0).data)>;
  auto* data = reinterpret_cast<Byte*>(values.data());
  return P({{data, 4 * cut}, {nullptr, 0}, {data + 4 * cut, 4 * (values.size() - cut)}});
}

Operation Make(const Case& c, Brought& b, bool within_hosts, bool in_place) {
  Operation operation;
  operation.fingerprint.kind = Kind::kAllReduce;
  operation.fingerprint.type = DType::kFloat32;
  operation.fingerprint.AddShape({static_cast<int64_t>(b.in.size())});
  operation.in = Cut<ConstBufferList>(b.in);
  operation.out = in_place ? Cut<BufferList>(b.in) : Cut<BufferList>(b.out);
  const BufferList error = c.codec.unit ? BufferList() : Cut<BufferList>(b.error);
  operation.compression = Compression{c.codec, error, 11, within_hosts};
  return operation;
}

Brought Bring(int rank, size_t count) {
  Brought b{std::vector<float>(count), std::vector<float>(count), std::vector<float>(count, 0.25f)};
  for (size_t i = 0; i < count; ++i) b.in[i] = Value(rank, i);
  return b;
}

std::vector<char> Bits(const std::vector<float>& values) {
  const auto* begin = reinterpret_cast<const char*>(values.data());
  return std::vector<char>(begin, begin + 4 * values.size());
}

void CheckSum(const Case& c, const std::vector<Brought>& all, bool compressed, int carriers) {
  const size_t count = all[0].out.size();
  const auto ranks = static_cast<float>(all.size());
  for (const Brought& b : all) { EXPECT(b.out.size() == count && Bits(b.out) == Bits(all[0].out)); }
  for (size_t i = 0; i < count; ++i) {
    float sum = 0, errors = 0;
    for (size_t r = 0; r < all.size(); ++r) {
      sum += Value(static_cast<int>(r), i);
      errors += 0.25f - all[r].error[i];
    }
    const float out = all[0].out[i];
    if (!compressed) {
      EXPECT(std::fabs(out - sum) <= 1e-5f && errors == 0);
    } else if (c.codec.unit) {
      EXPECT(out == 1 || out == -1 || out == 0);
    } else {
      // The result equals the inputs, minus the new residuals, plus the earlier residuals.
      EXPECT(std::fabs(out - (sum + errors)) <= 1e-5f * ranks);
    }
    if (compressed && c.bound > 0) {
      const float before = 0.25f * static_cast<float>(carriers), largest = ranks * 1.3f + before;
      const float bound = 2 * c.bound * largest + 1e-5f;
      EXPECT(std::fabs(out - (sum + before)) <= bound);
    }
  }
}

void CheckPlan(const Plan& plan, const Case& c, size_t count, bool within_hosts, bool in_place) {
  std::vector<Brought> all(static_cast<size_t>(plan.ranks));
  std::vector<uint64_t> sent(all.size());
  OnEachRank(plan, [&](Communicator& group) {
    const auto rank = static_cast<size_t>(group.rank());
    all[rank] = Bring(group.rank(), count);
    group.Run(Make(c, all[rank], within_hosts, in_place));
    if (in_place) all[rank].out = all[rank].in;
    sent[rank] = group.statistics().sent_bytes;
  });
  const bool compressed = plan.ranks > 1 && (within_hosts || plan.hosts > 1);
  // The encoding ranks keep the error of a value: one per host, or all.
  CheckSum(c, all, compressed, within_hosts ? plan.ranks : plan.hosts);
  if (plan.ranks == 2 && plan.hosts == 2 && !c.codec.unit) {
    // Half of the values are sent to the other rank, and half of the sums.
    const size_t half = count / 2;
    const size_t bytes = EncodedBytes(c.codec, half) + EncodedBytes(c.codec, count - half);
    EXPECT(sent[0] == bytes + sizeof(Fingerprint) && sent[1] == sent[0]);
  }
}

void CheckNotFinite(const Case& c) {
  Plan plan;
  plan.hosts = 2;
  OnEachRank(plan, [&](Communicator& group) {
    Brought b = Bring(group.rank(), 5000);
    if (group.rank() == 1) b.in[17] = std::numeric_limits<float>::quiet_NaN();
    group.Run(Make(c, b, false, false));
    EXPECT(std::isnan(b.out[17]) && std::isfinite(b.out[4000]));
    for (const float error : b.error) EXPECT(std::isfinite(error));
  });
}

void CheckDifference() {
  Plan plan;
  plan.hosts = 2;
  OnEachRank(plan, [&](Communicator& group) {
    Case c = Cases()[1];
    if (group.rank() == 1) c.codec.block = 512;
    Brought b = Bring(group.rank(), 5000);
    ExpectError([&] { group.Run(Make(c, b, false, false)); }, Code::kMismatch,
                {"The compression differs."});
  });
}

void CheckRefusals() {
  OnEachRank(Plan{}, [](Communicator& group) {
    Brought b = Bring(group.rank(), 100);
    Operation wrong = Make(Cases()[1], b, false, false);
    wrong.fingerprint.op = ReduceOp::kMax;
    ExpectError([&] { group.Run(std::move(wrong)); }, Code::kInvalidArgument, {"max of float32"});
    wrong = Make(Cases()[1], b, false, false);
    wrong.compression->error = BufferList(reinterpret_cast<char*>(b.error.data()), 8);
    ExpectError([&] { group.Run(std::move(wrong)); }, Code::kInvalidArgument, {"as large as"});
    wrong = Make(Cases()[1], b, false, false);
    wrong.compression->codec.bits = 5;
    ExpectError([&] { group.Run(std::move(wrong)); }, Code::kInvalidArgument, {"2, 4 or 8"});
  });
}

void CheckAll(bool quick) {
  for (const Case& c : Cases()) {
    for (const int ranks : {1, 2, 3, 4, 7}) {
      for (int hosts = 1; hosts <= ranks; ++hosts) {
        if (quick && ranks > 2 && (ranks != 4 || hosts % 2)) continue;
        Plan plan;
        plan.ranks = ranks;
        plan.hosts = hosts;
        for (const size_t count : {size_t{0}, size_t{1}, size_t{1003}, size_t{300001}}) {
          CheckPlan(plan, c, count, false, count % 2);
          if (hosts == 1) CheckPlan(plan, c, count, true, false);
        }
      }
    }
    CheckNotFinite(c);
    std::printf("%s: ok\n", c.name);
  }
  CheckDifference();
  CheckRefusals();
}

}  // namespace
}  // namespace tfdist::testing

int main(int argc, char** argv) {
  using namespace tfdist::testing;
  return Report([&] { CheckAll(argc > 1 && std::string(argv[1]) == "quick"); });
}
