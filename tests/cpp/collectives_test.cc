// Usage: collectives_test [threads|processes|both|many] [quick]
//
// Every collective, type and algorithm, on every arrangement of ranks, compared with known values.
// With "many", few values of few types among so many threads that all algorithms are used.
#include <sys/resource.h>

#include <cstdio>

#include "cpp/ranks.h"
#include "cpp/values.h"

namespace tfdist::testing {
namespace {

Operation Make(Kind kind, DType type, const std::vector<char>& in, std::vector<char>& out) {
  Operation operation;
  operation.fingerprint.kind = kind;
  operation.fingerprint.type = type;
  operation.in = ConstBufferList(in.data(), in.size());
  operation.out = BufferList(out.data(), out.size());
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
  operation.in =
      ConstBufferList({{in.data(), cut}, {nullptr, 0}, {in.data() + cut, in.size() - cut}});
  operation.out =
      BufferList({{out.data(), cut}, {nullptr, 0}, {out.data() + cut, out.size() - cut}});
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
  operation.sent_rows = {in.size()};
  operation.allocate = [&](const std::vector<size_t>& received) {
    EXPECT(received == sizes);
    out.resize(expected.size());
    return BufferList(out.data(), out.size());
  };
  c.Run(std::move(operation));
  EXPECT(out == expected);
}

// Rows without bytes count as rows: the size of the result depends on their number.
void CheckEmptyRows(Communicator& c) {
  std::vector<size_t> expected(static_cast<size_t>(c.size()));
  for (size_t rank = 0; rank < expected.size(); ++rank) expected[rank] = 5 + rank;
  for (const Kind kind : {Kind::kAllGather, Kind::kAllToAll}) {
    const auto own = static_cast<size_t>(c.rank()) + 5;
    Operation operation;
    operation.fingerprint.kind = kind;
    operation.row_bytes = 0;
    operation.sent_rows.assign(expected.size(), own);
    std::vector<size_t> received;
    operation.allocate = [&](const std::vector<size_t>& rows) {
      received = rows;
      return BufferList();
    };
    c.Run(std::move(operation));
    EXPECT(received == expected);
  }
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
    operation.sent_rows.push_back(sent.size());
    operation.received_rows.push_back(received.size());
  }
  out.resize(expected.size());
  operation.fingerprint.kind = Kind::kAllToAll;
  operation.fingerprint.type = type;
  operation.in = ConstBufferList(in.data(), in.size());
  operation.out = BufferList(out.data(), out.size());
  c.Run(std::move(operation));
  EXPECT(out == expected);
}

// Around a ring, each rank sends to the next; the even ranks send first.
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
  // With an odd number of ranks, two even ranks are neighbors; the last rank receives first.
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

// One message for each ordered pair of ranks.
void CheckPairs(Communicator& c, size_t count) {
  const DType type = DType::kFloat32;
  for (int from = 0; from < c.size(); ++from) {
    for (int to = 0; to < c.size(); ++to) {
      if (from == to || (c.rank() != from && c.rank() != to)) continue;
      const std::vector<char> sent = Fill(type, count, from, size_t(to));
      std::vector<char> received(sent.size()), none;
      Operation operation = c.rank() == from ? Make(Kind::kSend, type, sent, none)
                                             : Make(Kind::kReceive, type, none, received);
      operation.peer = c.rank() == from ? to : from;
      c.Run(std::move(operation));
      EXPECT(c.rank() == from || received == sent);
    }
  }
}

// Fewer and smaller cases, for slow sanitizers.
bool quick = false;

std::vector<size_t> Counts() {
  return quick ? std::vector<size_t>{0, 3, 5003} : std::vector<size_t>{0, 1, 3, 1001};
}

void CheckAll(Communicator& c, DType type, size_t count) {
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

void Everything(Communicator& c) {
  CheckEmptyRows(c);
  for (int t = 0; t < kDTypes; t += quick ? 3 : 1) {
    for (const size_t count : Counts()) CheckAll(c, static_cast<DType>(t), count);
  }
  for (const size_t count : Counts()) {
    CheckList(c, count);
    CheckPairs(c, count);
  }
}

// Each type once in many chunks, including unequal sizes and all roots.
void Large(Communicator& c) {
  for (int t = 0; t < kDTypes; ++t) {
    const auto type = static_cast<DType>(t);
    const size_t count = 280'001 / SizeOf(type);
    const ReduceOp op = IsFloating(type) ? ReduceOp::kMean : ReduceOp::kSum;
    CheckAllReduce(c, type, op, count, t % 2 == 0);
    CheckReduceScatter(c, type, op, count);
    CheckAllGather(c, type, count, t % 2 == 0);
    CheckBroadcast(c, type, count, t % c.size());
    CheckAllToAll(c, type, count, t % 2 == 0);
    CheckMessages(c, type, count);
  }
  const size_t larger = 300'001;
  CheckAllReduce(c, DType::kFloat32, ReduceOp::kSum, larger, true);
  CheckAllReduce(c, DType::kBfloat16, ReduceOp::kMean, larger, false);
  CheckReduceScatter(c, DType::kFloat32, ReduceOp::kSum, larger);
  CheckAllGather(c, DType::kFloat32, larger, false);
  CheckBroadcast(c, DType::kFloat32, larger, c.size() - 1);
  CheckAllToAll(c, DType::kFloat32, larger, false);
  CheckPairs(c, larger);
  CheckList(c, larger);
}

void AllReducesOnly(Communicator& c) {
  std::vector<size_t> counts = Counts();
  if (!quick) counts.push_back(70'001);
  for (int t = 0; t < kDTypes; t += quick ? 3 : 1) {
    const auto type = static_cast<DType>(t);
    for (const size_t count : counts) {
      CheckAllReduce(c, type, ReduceOp::kSum, count, true);
      CheckAllReduce(c, type, ReduceOp::kMax, count, false);
      if (IsFloating(type)) CheckAllReduce(c, type, ReduceOp::kMean, count, false);
    }
  }
  for (const size_t count : counts) CheckList(c, count);
  if (!quick) CheckAllReduce(c, DType::kFloat64, ReduceOp::kMean, 300'001, true);
}

void MeansOfIntegersAreRefused(Communicator& c) {
  std::vector<char> data(8);
  Operation operation = Make(Kind::kAllReduce, DType::kInt32, data, data);
  operation.fingerprint.op = ReduceOp::kMean;
  try {
    c.Run(std::move(operation));
    EXPECT(!"refused");
  } catch (const Error& error) { EXPECT(error.code() == Code::kInvalidArgument); }
  CheckBarrier(c);  // and the communicator still works
}

struct Arrangement {
  int ranks;
  int hosts;
};
constexpr Arrangement kArrangements[] = {{1, 1}, {2, 1}, {3, 1}, {4, 1}, {7, 1}, {2, 2},
                                         {3, 3}, {4, 4}, {7, 7}, {3, 2}, {4, 2}, {7, 3}};

void RunAll(As as) {
  for (const auto& [ranks, hosts] : kArrangements) {
    if (quick && ranks == 7 && hosts != 3) continue;
    Plan plan;
    plan.ranks = ranks;
    plan.hosts = hosts;
    plan.as = as;
    OnEachRank(plan, Everything);
    if (!quick) OnEachRank(plan, Large);
    OnEachRank(plan, MeansOfIntegersAreRefused);
    for (const char* algorithm : {"shm", "one_shot", "two_shot", "ring", "hierarchical"}) {
      plan.algorithm = algorithm;
      OnEachRank(plan, AllReducesOnly);
    }
    std::printf("%d ranks on %d hosts as %s: ok\n", ranks, hosts,
                as == As::kThreads ? "threads" : "processes");
    std::fflush(stdout);
  }
}

void AmongMany(Communicator& c) {
  for (const size_t count : {size_t{0}, size_t{3}, size_t{2003}, size_t{20'003}}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMax}) {
      CheckAllReduce(c, DType::kFloat32, op, count, true);
    }
    CheckAllReduce(c, DType::kBfloat16, ReduceOp::kSum, count, false);
    CheckAllReduce(c, DType::kInt64, ReduceOp::kSum, count, false);
  }
  CheckReduceScatter(c, DType::kFloat32, ReduceOp::kMean, 301);
  CheckAllGather(c, DType::kFloat32, 301, true);
  CheckAllGather(c, DType::kFloat32, 301, false);
  CheckBroadcast(c, DType::kFloat32, 5003, c.size() - 2);
  CheckAllToAll(c, DType::kFloat32, 11, false);
  CheckPairs(c, 301);
  CheckBarrier(c);
}

// Each rank has two descriptors per other rank, all in this process.
void AllowDescriptors() {
  rlimit limit;
  EXPECT(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  limit.rlim_cur = limit.rlim_max;
  EXPECT(setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

void RunMany() {
  AllowDescriptors();
  for (const auto& [ranks, hosts] : {Arrangement{17, 17}, {33, 33}, {33, 4}, {80, 1}, {80, 7}}) {
    Plan plan;
    plan.ranks = ranks;
    plan.hosts = hosts;
    OnEachRank(plan, AmongMany);
    std::printf("%d ranks on %d hosts: ok\n", ranks, hosts);
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
    if (which == "many") {
      tfdist::testing::RunMany();
      return 0;
    }
    if (which != "processes") tfdist::testing::RunAll(As::kThreads);
    if (which != "threads") tfdist::testing::RunAll(As::kProcesses);
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return 1;
  }
}
