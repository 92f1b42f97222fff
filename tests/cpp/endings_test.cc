// Usage: endings_test [quick]
//
// Groups that end by a timeout, by one rank's request, or normally; all ranks learn why.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

#include "cpp/calls.h"

namespace tfdist::testing {
namespace {

Error Failed(const std::string& message) {
  return Error(Code::kUnavailable, message, Event::kFailed, "rank 1");
}

// Whether a group was aborted by an event of a worker, and an operation of this rank failed by it.
bool EndedBy(Communicator& c, Event event, const std::string& worker) {
  const auto aborted = c.Aborted();
  return aborted && aborted->cause.event() == event && aborted->cause.worker() == worker &&
         aborted->detected && aborted->detected->rank == c.rank();
}

void Deadline(Plan plan) {
  plan.timeout_seconds = 1;
  plan.stall_seconds = 0.2;
  std::atomic<int> waiting{plan.ranks - 1};
  OnEachRank(plan, [&](Communicator& c) {
    Do(c, Kind::kBarrier, 0);
    while (c.rank() == 1 && waiting > 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    ExpectError([&] { Do(c, Kind::kAllReduce, 10); }, Code::kUnavailable,
                {"all_reduce 'x'", "for rank 1", "the longest that was allowed"});
    --waiting;
  });
}

// While rank 1 has not joined, and during a large transfer.
void AbortedByOne(const Plan& plan, Kind kind, size_t count) {
  OnEachRank(plan, [&](Communicator& c) {
    Do(c, Kind::kBarrier, 0);
    std::thread user;
    if (c.rank() == 1) {
      user = std::thread([&c] {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        c.Abort(Error(Code::kUnavailable, "the user pressed a key"));
      });
      if (count == 0) user.join();
    }
    ExpectError(
        [&] {
          for (;;) Do(c, kind, count);
        },
        Code::kUnavailable, {"the user pressed a key. Detected in"});
    if (user.joinable()) user.join();
  });
}

void LeftByOne(const Plan& plan, Kind kind) {
  OnEachRank(plan, [&](Communicator& c) {
    Do(c, kind, 10);
    if (c.rank() == 1) return c.Close();
    ExpectError([&] { Do(c, kind, 10); }, Code::kUnavailable,
                {"rank 1 has left the group: its program has ended"});
    EXPECT(EndedBy(c, Event::kLeft, "rank 1"));
  });
}

// A rank that leaves after a collective does not fail the ranks still in it.
void LeftAfterwards(const Plan& plan, Kind kind) {
  for (int round = 0; round < 5; ++round) {
    OnEachRank(plan, [&](Communicator& c) {
      Do(c, kind, 30'000);
      c.Close();
    });
  }
}

// Rank 1 reports that its step has failed, before the other ranks wait for it or while they do.
void StepFailsOnOne(const Plan& plan, Kind kind, bool goes_on) {
  std::atomic<int> waiting{plan.ranks - 1};
  OnEachRank(plan, [&](Communicator& c) {
    Do(c, Kind::kBarrier, 0);
    const std::vector<std::string> words{"rank 1 failed: the disk is full. Detected in"};
    if (c.rank() == 1) c.StepFailed(Failed("rank 1 failed: the disk is full."));
    if (c.rank() != 1 || goes_on) {
      ExpectError([&] { Do(c, kind, 10); }, Code::kUnavailable, words);
      EXPECT(EndedBy(c, Event::kFailed, "rank 1"));
    }
    if (c.rank() != 1) --waiting;
    while (waiting > 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  });
}

// No rank waits for another one, so the group stays usable.
void StepFailsOnAll(const Plan& plan, Kind kind) {
  OnEachRank(plan, [&](Communicator& c) {
    for (int round = 0; round < 3; ++round) {
      Do(c, kind, 10);
      c.StepFailed(Failed("a disk is full"));
    }
    Do(c, kind, 10);
  });
}

// Rank 1 gives up a collective that it has begun, since its step ends; then it reports the cause,
// or does not.
void StepEndsAroundACollective(const Plan& plan, bool says_why) {
  std::atomic<bool> ended{false};
  OnEachRank(plan, [&](Communicator& c) {
    const std::string ending =
        "rank 1 has given up its step, of which another operation has failed";
    Do(c, Kind::kBarrier, 0);
    if (c.rank() == 1) {
      Call call(c, Kind::kAllReduce, 10);
      call.operation.cancellation = std::make_shared<Cancellation>();
      call.operation.cancellation->Ask();
      ExpectError([&] { c.Run(std::move(call.operation)); }, Code::kUnavailable, {ending});
      if (says_why) c.StepFailed(Failed("rank 1 failed: the disk is full."));
      ended = true;
    }
    while (!ended) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    // The data that rank 1 had already sent may suffice for one more collective.
    ExpectError(
        [&] {
          for (;;) Do(c, Kind::kAllReduce, 10);
        },
        Code::kUnavailable, {says_why ? "rank 1 failed: the disk is full" : ending});
    if (c.rank() != 1) EXPECT(EndedBy(c, Event::kFailed, "rank 1"));
  });
}

// At the end of the data, the other ranks join the operation that rank 1's step has begun, and all
// continue.
void StepEndsWhereAllHaveJoined(const Plan& plan, Kind kind) {
  OnEachRank(plan, [&](Communicator& c) {
    Do(c, Kind::kBarrier, 0);
    Call call(c, kind, 10);
    if (c.rank() == 1) {
      call.operation.cancellation = std::make_shared<Cancellation>();
      call.operation.cancellation->Ask();
    }
    c.Run(std::move(call.operation));
    Do(c, kind, 10);
  });
}

void ClosedHere(const Plan& plan) {
  OnEachRank(plan, [&](Communicator& c) {
    Do(c, Kind::kAllReduce, 10);
    c.Close();
    ExpectError([&] { Do(c, Kind::kAllReduce, 10); }, Code::kClosed, {"closed"});
    c.Close();
  });
}

void All(const std::vector<std::pair<int, int>>& arrangements) {
  for (const auto& [ranks, hosts] : arrangements) {
    const Plan plan = Arranged(ranks, hosts, As::kThreads);
    for (const Kind kind : kKindsOfGroups) {
      AbortedByOne(plan, kind, 0);
      AbortedByOne(plan, kind, 300'000);
      LeftByOne(plan, kind);
      LeftAfterwards(plan, kind);
      StepFailsOnOne(plan, kind, true);
      StepFailsOnOne(plan, kind, false);
      StepFailsOnAll(plan, kind);
      StepEndsWhereAllHaveJoined(plan, kind);
    }
    for (const bool says_why : {true, false}) StepEndsAroundACollective(plan, says_why);
    ClosedHere(plan);
    Deadline(plan);
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
