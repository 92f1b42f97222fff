// Usage: device_rounds_test ROUNDS
//
// GPU groups that are repeatedly created, used, aborted, lost or closed: no resources leak in the
// process, its driver or its NCCL. FAKE_CUDA and FAKE_NCCL are the paths of these libraries.
#include <malloc.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpp/device_calls.h"
#include "cpp/nccl_threads.h"
#include "cpp/rounds.h"

namespace tfdist::testing {
namespace {

constexpr size_t kRoom = size_t{1} << 20;

// The resources that this process holds of its driver and of NCCL.
std::string Held() { return HeldByDriver() + "; " + HeldByNccl(); }

void RepeatOnGpus(int rounds, const std::function<void(int round)>& round, int closed = 0) {
  const std::string before = Held();
  const auto watched = [&](int number) {
    round(number);
    if (Held() == before) return;
    throw Failure("Round " + std::to_string(number) + " leaves " + Held() + ", not " + before);
  };
  Repeat(rounds, watched, closed);
}

void Reduce(Communicator& c, Memory& memory) {
  AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {5000, 7, 900});
}

// Closed after use, aborted during an operation, closed by one rank, never used, closed with
// launched work.
void AsThreads(const Plan& plan, std::deque<Memory>& memories, int number) {
  OnEachRank(plan, [&](Communicator& c) {
    Memory& memory = memories[static_cast<size_t>(c.rank())];
    try {
      if (number % 5 == 3) return;
      Reduce(c, memory);
      Message(c, memory, 9000);
      if (number % 5 == 1 && c.rank() == 0)
        c.Abort(Error(Code::kUnavailable, "a round ends early"));
      if (number % 5 == 2 && c.rank() == 1) return c.Close();
      if (number % 5 == 4) return Launch(c, memory, 9000);
      for (int i = 0; i < 3; ++i) Reduce(c, memory);
      EXPECT(number % 5 == 0);
    } catch (const Error& error) {
      if (error.code() != Code::kUnavailable || number % 5 == 0) throw;
    }
  });
}

// A group whose rank 1 is another process, forked before this process has a driver. It stops until
// its turn.
struct Pair {
  explicit Pair(const Plan& plan) : wiring(plan) {}

  Wiring wiring;
  pid_t child = -1;
};

[[noreturn]] void IsKilled(std::deque<std::unique_ptr<Pair>>& pairs, size_t own) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  for (size_t other = 0; other < pairs.size(); ++other) {
    if (other != own) pairs[other] = nullptr;
  }
  raise(SIGSTOP);
  Communicator c(pairs[own]->wiring.Take(1));
  Memory memory(0, kRoom);
  for (size_t i = 0; i < 1 + own % 3; ++i) Reduce(c, memory);
  kill(getpid(), SIGKILL);
  std::abort();
}

// This process continues; rank 1 is killed, and a new process takes its place.
void WithLosses(const Plan& plan, int rounds) {
  std::deque<std::unique_ptr<Pair>> pairs;
  for (int i = 0; i < kFirstRounds + rounds; ++i) pairs.push_back(std::make_unique<Pair>(plan));
  for (size_t i = 0; i < pairs.size(); ++i) {
    pairs[i]->child = fork();
    if (pairs[i]->child == 0) IsKilled(pairs, i);
    EXPECT(pairs[i]->child > 0);
    EXPECT(waitpid(pairs[i]->child, nullptr, WUNTRACED) == pairs[i]->child);
  }
  LoadLibraries();
  Memory memory(0, kRoom);
  const auto round = [&](int) {
    const std::unique_ptr<Pair> pair = std::move(pairs.front());
    pairs.pop_front();
    Communicator c(pair->wiring.Take(0));
    kill(pair->child, SIGCONT);
    ExpectError(
        [&] {
          for (;;) Reduce(c, memory);
        },
        Code::kUnavailable, {"rank 1 is lost: its process has ended"});
    waitpid(pair->child, nullptr, 0);
  };
  // Both ends of a control and a data socket, or the shared memory, per host.
  RepeatOnGpus(rounds, round, plan.hosts == 1 ? 3 : 6);
}

void Rounds(const std::function<Plan(As)>& plan, int rounds) {
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_MMAP_THRESHOLD, 1 << 20);  // otherwise the allocator keeps some large blocks
  WithLosses(plan(As::kProcesses), rounds / 10);
  std::deque<Memory> memories;
  for (int rank = 0; rank < 2; ++rank) memories.emplace_back(0, kRoom);
  const Plan threads = plan(As::kThreads);
  RepeatOnGpus(rounds, [&](int number) { AsThreads(threads, memories, number); });
}

void All(int rounds) {
  const std::pair<std::string, std::function<Plan(As)>> ways[] = {
      {"own kernels", [](As as) { return PlanFor("p2p", 2, 1, as); }},
      {"streams that wait", [](As as) { return PlanForStreams(2, as); }},
      {"the host", [](As as) { return PlanFor("host", 2, 2, as); }},
      {"NCCL", [](As as) { return PlanFor("nccl", 2, 2, as); }},
      {"NCCL with windows",
       [](As as) {
         setenv("FAKE_NCCL_VERSION", "23203", 1);
         return PlanFor("nccl", 2, 1, as);
       }},
  };
  for (const auto& [name, plan] : ways) {
    // Each in its own process, with its own driver.
    InParallel({[&plan = plan, rounds] { Rounds(plan, rounds); }});
    std::printf("%s: ok\n", name.c_str());
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace tfdist::testing

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 100;
  return tfdist::testing::Report([&] { tfdist::testing::All(rounds); });
}
