// Several concurrent groups, and several callers of one group.
#include <atomic>
#include <cstdio>
#include <future>
#include <memory>
#include <numeric>
#include <thread>

#include "cpp/calls.h"

namespace tfdist::testing {
namespace {

// The sum over the ranks of each rank's number plus one.
void CheckSum(Communicator& c, size_t count, const std::string& name) {
  Call call(c, Kind::kAllReduce, count, name);
  std::vector<float> in(count, static_cast<float>(c.rank() + 1)), out(count);
  call.operation.in = ConstBufferList(reinterpret_cast<char*>(in.data()), count * sizeof(float));
  call.operation.out = BufferList(reinterpret_cast<char*>(out.data()), count * sizeof(float));
  c.Run(std::move(call.operation));
  const auto sum = static_cast<float>(c.size() * (c.size() + 1) / 2);
  EXPECT(out == std::vector<float>(count, sum));
}

// Four ranks and their two halves, consecutively and concurrently. The whole group outlives an
// aborted half.
void Subgroups(int hosts) {
  Wiring all(Arranged(4, hosts, As::kThreads)), low(Arranged(2, 1, As::kThreads)),
      high(Arranged(2, hosts, As::kThreads));
  std::vector<Communicator::Setup> whole, half;
  for (int rank = 0; rank < 4; ++rank) {
    whole.push_back(all.Take(rank));
    half.push_back(rank < 2 ? low.Take(rank) : high.Take(rank - 2));
  }
  OnEachThread(std::move(whole), [&](Communicator& c) {
    Communicator h(std::move(half[static_cast<size_t>(c.rank())]));
    for (const size_t count : {size_t{0}, size_t{1}, size_t{1001}, size_t{100'001}}) {
      CheckSum(c, count, "whole");
      CheckSum(h, count, "half");
      auto other = std::async(std::launch::async, [&] {
        for (int i = 0; i < 10; ++i) CheckSum(h, count, "half");
      });
      for (int i = 0; i < 10; ++i) CheckSum(c, count, "whole");
      other.get();
    }
    if (c.rank() == 0) h.Abort(Error(Code::kUnavailable, "this half ends"));
    if (c.rank() < 2) {
      ExpectError(
          [&] {
            for (;;) CheckSum(h, 10, "half");
          },
          Code::kUnavailable, {"this half ends"});
    } else {
      CheckSum(h, 10, "half");
    }
    CheckSum(c, 10, "whole");
  });
}

// Many queued collectives, whose callbacks run in order; a callback may not start one.
void Queue(const Plan& plan) {
  OnEachRank(plan, [&](Communicator& c) {
    constexpr int kMany = 200;
    std::vector<int> done;
    std::vector<std::unique_ptr<Call>> calls;
    std::promise<void> last;
    for (int i = 0; i < kMany; ++i) {
      const Kind kind = kKindsOfGroups[i % 6];
      calls.push_back(std::make_unique<Call>(c, kind, size_t(i) * 37));
      c.Enqueue(std::move(calls.back()->operation), [&, i](const Error* error) {
        if (!error) done.push_back(i);
        if (i + 1 == kMany) last.set_value();
      });
      if (i % 50 == 49) Do(c, Kind::kBarrier, 0, std::to_string(i));
    }
    last.get_future().get();
    std::vector<int> expected(kMany);
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT(done == expected);

    std::promise<std::string> refused;
    Call barrier(c, Kind::kBarrier, 0);
    c.Enqueue(std::move(barrier.operation), [&](const Error*) {
      try {
        Do(c, Kind::kBarrier, 0);
        refused.set_value("");
      } catch (const Error& error) { refused.set_value(error.what()); }
    });
    EXPECT(refused.get_future().get().find("must not wait for it") != std::string::npos);
  });
}

// Operations in the queue when the group is lost, and later ones after it is closed.
void QueueThatFails(const Plan& plan) {
  OnEachRank(plan, [&](Communicator& c) {
    std::atomic<int> unavailable{0}, closed{0};
    std::vector<std::unique_ptr<Call>> calls;
    const auto enqueue = [&] {
      calls.push_back(std::make_unique<Call>(c, Kind::kAllReduce, 1000));
      c.Enqueue(std::move(calls.back()->operation), [&](const Error* error) {
        unavailable += error && error->code() == Code::kUnavailable;
        closed += error && error->code() == Code::kClosed;
      });
    };
    if (c.rank() == 1) c.Abort(Error(Code::kUnavailable, "given up"));
    for (int i = 0; i < 10; ++i) enqueue();
    c.Close();
    enqueue();
    EXPECT(unavailable == 10 && closed == 1);
  });
}

// An exception of an operation fails only that operation.
void QueueOfAnOperationThatThrows() {
  OperationQueue queue("one", [](Operation&) { throw std::bad_alloc(); });
  queue.Start();
  std::promise<std::string> failure;
  queue.Enqueue(Operation(), [&](const Error* error) {
    failure.set_value(error && error->code() == Code::kInternal ? error->what() : "");
  });
  EXPECT(failure.get_future().get().find("An operation of the communicator 'one' has failed: ") ==
         0);
  queue.Close();
}

void All() {
  QueueOfAnOperationThatThrows();
  for (const int hosts : {1, 2}) Subgroups(hosts);
  for (const auto& [ranks, hosts] : kArrangements) {
    const Plan plan = Arranged(ranks, hosts, As::kThreads);
    Queue(plan);
    QueueThatFails(plan);
    std::printf("%d ranks on %d hosts: ok\n", ranks, hosts);
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace tfdist::testing

int main() { return tfdist::testing::Report(tfdist::testing::All); }
