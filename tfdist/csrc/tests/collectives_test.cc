// Usage: collectives_test [threads|processes|both] [quick]
//
// Every collective, type and algorithm, on every arrangement of ranks, against values known
// beforehand.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "reduce/half.h"
#include "tests/team.h"

namespace tfdist::testing {
namespace {

// Values that half types hold exactly, and so do their sums and products over few ranks.
double Value(int rank, size_t i) { return static_cast<double>((i * 7 + size_t(rank) * 3) % 4); }

void Put(DType type, double value, char* at) {
  const auto put = [at](auto typed) { std::memcpy(at, &typed, sizeof(typed)); };
  switch (type) {
    case DType::kBool: return put(static_cast<uint8_t>(value != 0));
    case DType::kUint8: return put(static_cast<uint8_t>(value));
    case DType::kInt8: return put(static_cast<int8_t>(value));
    case DType::kInt32: return put(static_cast<int32_t>(value));
    case DType::kInt64: return put(static_cast<int64_t>(value));
    case DType::kFloat32: return put(static_cast<float>(value));
    case DType::kFloat64: return put(value);
    case DType::kFloat16: {
      Float16 half;
      FromFloat(static_cast<float>(value), &half);
      return put(half);
    }
    case DType::kBfloat16: {
      Bfloat16 half;
      FromFloat(static_cast<float>(value), &half);
      return put(half);
    }
  }
}

std::vector<char> Fill(DType type, size_t count, int rank, size_t offset = 0) {
  std::vector<char> data(count * SizeOf(type));
  for (size_t i = 0; i < count; ++i) Put(type, Value(rank, i + offset), &data[i * SizeOf(type)]);
  return data;
}

double Reduced(DType type, ReduceOp op, int ranks, size_t i) {
  double result = Value(0, i);
  if (type == DType::kBool) result = result != 0;
  for (int rank = 1; rank < ranks; ++rank) {
    double next = Value(rank, i);
    if (type == DType::kBool) next = next != 0;
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kMean: result += next; break;
      case ReduceOp::kMin: result = std::min(result, next); break;
      case ReduceOp::kMax: result = std::max(result, next); break;
      case ReduceOp::kProduct: result *= next; break;
    }
  }
  return op == ReduceOp::kMean ? static_cast<double>(static_cast<float>(result) *
                                                     static_cast<float>(1.0 / ranks))
                               : result;
}

std::vector<char> Expected(DType type, ReduceOp op, int ranks, size_t count, size_t offset = 0) {
  std::vector<char> data(count * SizeOf(type));
  for (size_t i = 0; i < count; ++i) {
    double value = Reduced(type, op, ranks, i + offset);
    if (type == DType::kFloat64 && op == ReduceOp::kMean) {
      value = Reduced(type, ReduceOp::kSum, ranks, i + offset) * (1.0 / ranks);
    }
    // The product wraps around in small integers.
    if (type == DType::kUint8) value = static_cast<uint8_t>(static_cast<int64_t>(value));
    if (type == DType::kInt8) value = static_cast<int8_t>(static_cast<int64_t>(value));
    if (type == DType::kInt32) value = static_cast<int32_t>(static_cast<int64_t>(value));
    Put(type, value, &data[i * SizeOf(type)]);
  }
  return data;
}

Operation Make(Kind kind, DType type, const std::vector<char>& in, std::vector<char>& out) {
  Operation operation;
  operation.fingerprint.kind = kind;
  operation.fingerprint.type = type;
  operation.in = ConstPieces(in.data(), in.size());
  operation.out = Pieces(out.data(), out.size());
  return operation;
}

void CheckAllReduce(Communicator& c, DType type, ReduceOp op, size_t count, bool in_place) {
  std::vector<char> in = Fill(type, count, c.rank()), out(in.size());
  Operation operation = Make(Kind::kAllReduce, type, in, in_place ? in : out);
  operation.fingerprint.op = op;
  operation.fingerprint.AddShape({static_cast<int64_t>(count)});
  c.Run(std::move(operation));
  EXPECT((in_place ? in : out) == Expected(type, op, c.size(), count));
}

// Three tensors in one collective, one of them empty.
void CheckList(Communicator& c, size_t count) {
  const DType type = DType::kFloat32;
  std::vector<char> in = Fill(type, count, c.rank()), out(in.size());
  const size_t cut = count / 3 * SizeOf(type);
  Operation operation;
  operation.fingerprint.kind = Kind::kAllReduce;
  operation.fingerprint.type = type;
  operation.in = ConstPieces({{in.data(), cut}, {nullptr, 0}, {in.data() + cut, in.size() - cut}});
  operation.out = Pieces({{out.data(), cut}, {nullptr, 0}, {out.data() + cut, out.size() - cut}});
  operation.fingerprint.AddShape({static_cast<int64_t>(count / 3)});
  operation.fingerprint.AddShape({0});
  operation.fingerprint.AddShape({static_cast<int64_t>(count - count / 3)});
  c.Run(std::move(operation));
  EXPECT(out == Expected(type, ReduceOp::kSum, c.size(), count));
}

void CheckReduceScatter(Communicator& c, DType type, ReduceOp op, size_t count) {
  const auto ranks = static_cast<size_t>(c.size());
  std::vector<char> in = Fill(type, count * ranks, c.rank()), out(count * SizeOf(type));
  Operation operation = Make(Kind::kReduceScatter, type, in, out);
  operation.fingerprint.op = op;
  operation.fingerprint.AddShape({static_cast<int64_t>(count)});
  c.Run(std::move(operation));
  EXPECT(out == Expected(type, op, c.size(), count, count * static_cast<size_t>(c.rank())));
}

void CheckAllGather(Communicator& c, DType type, size_t count, bool equal) {
  std::vector<char> expected;
  std::vector<size_t> sizes;
  for (int rank = 0; rank < c.size(); ++rank) {
    const size_t own = equal ? count : count * static_cast<size_t>(rank) / 2;
    const std::vector<char> part = Fill(type, own, rank);
    expected.insert(expected.end(), part.begin(), part.end());
    sizes.push_back(part.size());
  }
  const size_t own = sizes[static_cast<size_t>(c.rank())] / SizeOf(type);
  const std::vector<char> in = Fill(type, own, c.rank());
  std::vector<char> out;
  Operation operation = Make(Kind::kAllGather, type, in, out);
  operation.allocate = [&](const std::vector<size_t>& received) {
    EXPECT(received == sizes);
    out.resize(expected.size());
    return Pieces(out.data(), out.size());
  };
  c.Run(std::move(operation));
  EXPECT(out == expected);
}

void CheckBroadcast(Communicator& c, DType type, size_t count, int root) {
  std::vector<char> data = Fill(type, count, c.rank());
  Operation operation = Make(Kind::kBroadcast, type, data, data);
  operation.fingerprint.root = root;
  operation.fingerprint.AddShape({static_cast<int64_t>(count)});
  c.Run(std::move(operation));
  EXPECT(data == Fill(type, count, root));
}

void CheckAllToAll(Communicator& c, DType type, size_t count, bool equal) {
  const auto elements = [&](int from, int to) {
    return equal ? count : count * static_cast<size_t>((from + 2 * to) % 3);
  };
  std::vector<char> in, expected, out;
  Operation operation;
  for (int other = 0; other < c.size(); ++other) {
    const auto sent = Fill(type, elements(c.rank(), other), c.rank(), size_t(other));
    const auto received = Fill(type, elements(other, c.rank()), other, size_t(c.rank()));
    in.insert(in.end(), sent.begin(), sent.end());
    expected.insert(expected.end(), received.begin(), received.end());
    operation.sent_bytes.push_back(sent.size());
    operation.received_bytes.push_back(received.size());
  }
  out.resize(expected.size());
  operation.fingerprint.kind = Kind::kAllToAll;
  operation.fingerprint.type = type;
  operation.in = ConstPieces(in.data(), in.size());
  operation.out = Pieces(out.data(), out.size());
  c.Run(std::move(operation));
  EXPECT(out == expected);
}

// Around a ring, every rank sending to the next; the even ones send first.
void CheckMessages(Communicator& c, DType type, size_t count) {
  if (c.size() < 2) return;
  const int next = (c.rank() + 1) % c.size(), previous = (c.rank() + c.size() - 1) % c.size();
  const std::vector<char> in = Fill(type, count, c.rank());
  std::vector<char> out(in.size()), none;
  const auto send = [&] {
    Operation operation = Make(Kind::kSend, type, in, none);
    operation.peer = next;
    c.Run(std::move(operation));
  };
  const auto receive = [&] {
    Operation operation = Make(Kind::kReceive, type, none, out);
    operation.peer = previous;
    c.Run(std::move(operation));
  };
  // An odd number of ranks has two even neighbours; the last rank receives first.
  const bool first = c.rank() % 2 == 0 && !(c.rank() == c.size() - 1);
  if (first) send();
  receive();
  if (!first) send();
  EXPECT(out == Fill(type, count, previous));
}

void CheckBarrier(Communicator& c) {
  std::vector<char> none;
  c.Run(Make(Kind::kBarrier, DType::kUint8, none, none));
}

// Fewer and smaller cases, for sanitizers that are slow.
bool quick = false;

std::vector<size_t> Counts() {
  return quick ? std::vector<size_t>{0, 3, 5003} : std::vector<size_t>{0, 1, 3, 1001, 70001};
}

void Everything(Communicator& c) {
  for (int t = 0; t < kDTypes; t += quick ? 3 : 1) {
    const auto type = static_cast<DType>(t);
    for (const size_t count : Counts()) {
      for (int o = 0; o < kReduceOps; ++o) {
        const auto op = static_cast<ReduceOp>(o);
        if (op == ReduceOp::kMean && !IsFloating(type)) continue;
        CheckAllReduce(c, type, op, count, count % 2 == 0);
        CheckReduceScatter(c, type, op, count);
      }
      CheckAllGather(c, type, count, true);
      CheckAllGather(c, type, count, false);
      for (int root = 0; root < c.size(); ++root) CheckBroadcast(c, type, count, root);
      CheckAllToAll(c, type, count, true);
      CheckAllToAll(c, type, count, false);
      CheckMessages(c, type, count);
      CheckBarrier(c);
    }
  }
  for (const size_t count : Counts()) CheckList(c, count);
  if (quick) return;
  CheckAllReduce(c, DType::kFloat32, ReduceOp::kSum, 3'000'001, true);
  CheckAllReduce(c, DType::kBfloat16, ReduceOp::kMean, 1'000'003, false);
  CheckList(c, 500'009);
}

void AllReducesOnly(Communicator& c) {
  for (const size_t count : Counts()) {
    CheckAllReduce(c, DType::kFloat32, ReduceOp::kSum, count, true);
    CheckAllReduce(c, DType::kBfloat16, ReduceOp::kMean, count, false);
    CheckAllReduce(c, DType::kInt64, ReduceOp::kMax, count, false);
    CheckList(c, count);
  }
  if (!quick) CheckAllReduce(c, DType::kFloat64, ReduceOp::kMean, 1'000'001, true);
}

void MeansOfIntegersAreRefused(Communicator& c) {
  std::vector<char> data(8);
  Operation operation = Make(Kind::kAllReduce, DType::kInt32, data, data);
  operation.fingerprint.op = ReduceOp::kMean;
  try {
    c.Run(std::move(operation));
    EXPECT(!"refused");
  } catch (const Error& error) {
    EXPECT(error.code() == Code::kInvalidArgument);
  }
  CheckBarrier(c);  // and the communicator lives on
}

struct Arrangement {
  int ranks;
  int hosts;
};
constexpr Arrangement kArrangements[] = {{1, 1}, {2, 1}, {3, 1}, {4, 1}, {7, 1}, {2, 2},
                                         {3, 3}, {4, 2}, {3, 2}, {7, 3}, {4, 4}};

void RunAll(As as) {
  for (const auto& [ranks, hosts] : kArrangements) {
    Plan plan;
    plan.ranks = ranks;
    plan.hosts = hosts;
    plan.as = as;
    OnEachRank(plan, Everything);
    OnEachRank(plan, MeansOfIntegersAreRefused);
    for (const char* algorithm : {"shared", "whole", "direct", "ring", "hierarchical"}) {
      plan.algorithm = algorithm;
      OnEachRank(plan, AllReducesOnly);
    }
    std::printf("%d ranks on %d hosts as %s: ok\n", ranks, hosts,
                as == As::kThreads ? "threads" : "processes");
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace tfdist::testing

int main(int argc, char** argv) {
  using tfdist::testing::As;
  const std::string which = argc > 1 ? argv[1] : "both";
  tfdist::testing::quick = argc > 2 && argv[2] == std::string("quick");
  try {
    if (which != "processes") tfdist::testing::RunAll(As::kThreads);
    if (which != "threads") tfdist::testing::RunAll(As::kProcesses);
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return 1;
  }
}
