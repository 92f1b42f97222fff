// Usage: mismatches_test [quick]
//
// Ranks that do not call the same collective: an error on every rank that names both sides; never a
// hang, never a wrong sum.
#include <cstdio>

#include "cpp/calls.h"

namespace tfdist::testing {
namespace {

using Change = std::function<void(Call&)>;

void Reshape(Call& call, const std::vector<int64_t>& shape) {
  Fingerprint& f = call.operation.fingerprint;
  const Fingerprint before = f;
  f = Fingerprint();
  f.kind = before.kind;
  f.type = before.type;
  f.SetName(before.name);
  f.AddShape(shape);
}

// Rank 1 calls something else than the other ranks.
void Odd(const Plan& plan, const char* what, Kind kind, size_t count,
         const std::function<void(Communicator&)>& odd) {
  try {
    OnEachRank(plan, [&](Communicator& c) {
      Do(c, Kind::kBarrier, 0);
      ExpectError([&] { c.rank() == 1 ? odd(c) : Do(c, kind, count); }, Code::kMismatch,
                  {"rank 1", "rank "});
      // Later operations fail with the same reason.
      ExpectError([&] { Do(c, kind, count); }, Code::kMismatch, {"rank 1"});
    });
  } catch (const Failure& failure) {
    throw Failure("Another " + std::string(what) + " in " + NameOf(kind) + " of " +
                  std::to_string(count) + ": " + failure.what());
  }
}

void Collectives(const Plan& plan, Kind kind, size_t count) {
  const auto changed = [&](const char* what, const Change& change) {
    Odd(plan, what, kind, count, [&](Communicator& c) {
      Call call(c, kind, count);
      change(call);
      c.Run(std::move(call.operation));
    });
  };
  const auto& shape_of = [count](int64_t first) {
    return std::vector<int64_t>{first, static_cast<int64_t>(count) / first};
  };
  Odd(plan, "name", kind, count, [&](Communicator& c) { Do(c, kind, count, "y"); });
  Odd(plan, "kind", kind, count, [&](Communicator& c) {
    Do(c, kind == Kind::kBarrier ? Kind::kAllReduce : Kind::kBarrier, count);
  });
  changed("list", [](Call& call) { call.operation.fingerprint.AddShape({0}); });
  if (kind == Kind::kBarrier) return;
  Odd(plan, "type", kind, count, [&](Communicator& c) { Do(c, kind, count, "x", DType::kInt32); });
  Odd(plan, "count", kind, count, [&](Communicator& c) { Do(c, kind, count + 1); });
  changed("shape", [&](Call& call) { Reshape(call, shape_of(2)); });
  if (kind == Kind::kAllReduce || kind == Kind::kReduceScatter) {
    changed("op", [](Call& call) { call.operation.fingerprint.op = ReduceOp::kMax; });
  }
  if (kind == Kind::kBroadcast) {
    changed("root", [](Call& call) { call.operation.fingerprint.root = 1; });
  }
}

void Order(const Plan& plan, Kind kind, size_t count) {
  OnEachRank(plan, [&](Communicator& c) {
    ExpectError(
        [&] {
          Do(c, kind, count, c.rank() == 1 ? "b" : "a");
          Do(c, kind, count, c.rank() == 1 ? "a" : "b");
        },
        Code::kMismatch, {"'a'", "'b'"});
  });
}

// A short message is sent before the ranks compare: the next operation then fails.
void Messages(const Plan& plan, size_t count) {
  const auto failing = [&](const std::function<void(Communicator&)>& odd) {
    OnEachRank(plan, [&](Communicator& c) {
      ExpectError(
          [&] {
            c.rank() == 1 ? odd(c) : DoMessage(c, count);
            Do(c, Kind::kBarrier, 0);
          },
          Code::kMismatch, {"rank 0", "rank 1", "send", "receive"});
    });
  };
  failing([&](Communicator& c) { DoMessage(c, count, "y"); });
  failing([&](Communicator& c) { DoMessage(c, count, "x", DType::kInt32); });
  failing([&](Communicator& c) { DoMessage(c, count + 1); });
}

void MessageAmongCollectives(const Plan& plan, Kind kind) {
  OnEachRank(plan, [&](Communicator& c) {
    ExpectError(
        [&] {
          if (c.rank() != 1) return Do(c, kind, 10);
          Call call(c, Kind::kReceive, 10);
          call.operation.peer = 0;
          c.Run(std::move(call.operation));
        },
        Code::kMismatch, {"receive", NameOf(kind)});
  });
}

void All(const std::vector<std::pair<int, int>>& arrangements) {
  for (const auto& [ranks, hosts] : arrangements) {
    const Plan plan = Arranged(ranks, hosts, As::kThreads);
    for (const size_t count : {size_t{10}, size_t{100'000}}) {
      for (const Kind kind : kKindsOfGroups) {
        Collectives(plan, kind, count);
        Order(plan, kind, count);
      }
      Messages(plan, count);
    }
    for (const Kind kind : kKindsOfGroups) MessageAmongCollectives(plan, kind);
    std::printf("%d ranks on %d hosts: ok\n", ranks, hosts);
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace tfdist::testing

int main(int argc, char** argv) {
  using namespace tfdist::testing;
  return Report([&] { All(Arrangements(argc, argv)); });
}
