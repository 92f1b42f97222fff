// Usage: rounds_test ROUNDS
//
// Groups that are repeatedly created, used, aborted, lost or closed: nothing is left behind.
#include <malloc.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "cpp/calls.h"
#include "cpp/rounds.h"

namespace tfdist::testing {
namespace {

// Closed after use, aborted during an operation, closed by one rank, never used.
void AsThreads(const Plan& plan, int number) {
  const Kind kind = kKindsOfGroups[number % 6];
  OnEachRank(plan, [&](Communicator& c) {
    try {
      if (number % 4 == 3) return;
      Do(c, kind, 1000);
      DoMessage(c, 1000);
      if (number % 4 == 1 && c.rank() == 0)
        c.Abort(Error(Code::kUnavailable, "a round ends early"));
      if (number % 4 == 2 && c.rank() == 1) return c.Close();
      for (int i = 0; i < 3; ++i) Do(c, kind, 1000);
      EXPECT(number % 4 == 0);
    } catch (const Error& error) {
      if (error.code() != Code::kUnavailable || number % 4 == 0) throw;
    }
  });
}

// This process continues; rank 1, another process, is killed, and a new one takes its place.
void WithLosses(int hosts, int number) {
  const Kind kind = kKindsOfGroups[number % 6];
  Wiring wiring(Arranged(2, hosts, As::kProcesses));
  const pid_t child = fork();
  EXPECT(child >= 0);
  Communicator c(wiring.Take(child == 0 ? 1 : 0));
  for (int i = 0; i < 1 + number % 3; ++i) Do(c, kind, 1000);
  if (child == 0) kill(getpid(), SIGKILL);
  ExpectError(
      [&] {
        for (;;) Do(c, kind, 1000);
      },
      Code::kUnavailable, {"rank 1 is lost: its process has ended"});
  waitpid(child, nullptr, 0);
}

void All(int rounds) {
  mallopt(M_ARENA_MAX, 1);
  for (const int hosts : {1, 2}) {
    Repeat(rounds / 10, [&](int number) { WithLosses(hosts, number); });
  }
  for (const auto& [ranks, hosts] : kArrangements) {
    const Plan plan = Arranged(ranks, hosts, As::kThreads);
    Repeat(rounds, [&](int number) { AsThreads(plan, number); });
    std::printf("%d ranks on %d hosts: ok\n", ranks, hosts);
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace tfdist::testing

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 100;
  return tfdist::testing::Report([&] { tfdist::testing::All(rounds); });
}
