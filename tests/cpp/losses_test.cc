// Usage: losses_test kill|stop [quick|one]
//
// A rank dies or stops: an error that names it on every other rank, in any operation.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

#include "cpp/calls.h"

namespace tfdist::testing {
namespace {

enum class Phase { kFirst, kBetween, kMiddle };

// The ranks' repeated operation. Rank 1 contributes much data to each.
void Step(Communicator& c, Kind kind, size_t count) {
  if (kind == Kind::kSend) {
    DoMessage(c, count);
    return Do(c, Kind::kBarrier, 0);
  }
  Call call(c, kind, count);
  if (kind == Kind::kBroadcast) call.operation.fingerprint.root = 1;
  c.Run(std::move(call.operation));
}

uint64_t Traffic(Communicator& c) {
  const auto s = c.statistics();
  return s.shared_bytes + s.sent_bytes + s.received_bytes;
}

[[noreturn]] void Fall(int signal) {
  kill(getpid(), signal);
  std::this_thread::sleep_for(std::chrono::seconds(60));
  _exit(1);
}

// After half of a step's bytes have been transferred.
void FallInTheMiddle(Communicator& c, Kind kind, size_t count, int signal) {
  const uint64_t before = Traffic(c);
  Step(c, kind, count);
  const uint64_t after = Traffic(c), half = after + (after - before) / 2;
  EXPECT(after > before);
  std::thread([&c, half, signal] {
    while (Traffic(c) < half) std::this_thread::yield();
    Fall(signal);
  }).detach();
  for (;;) Step(c, kind, count);
}

void Lose(const Plan& plan, Kind kind, Phase phase, int signal, const std::string& word) {
  const size_t count = phase == Phase::kMiddle ? 1'000'000 : 10;
  auto* const victim = static_cast<std::atomic<pid_t>*>(
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  OnEachProcess(plan, 1, [&](Communicator& c) {
    if (c.rank() == 1) {
      *victim = getpid();
      if (phase == Phase::kFirst) Fall(signal);
      Step(c, kind, count);
      if (phase == Phase::kMiddle) FallInTheMiddle(c, kind, count, signal);
      Fall(signal);
    }
    ExpectError(
        [&] {
          for (;;) Step(c, kind, count);
        },
        Code::kUnavailable, {"rank 1 is lost", word, "Detected in "});
    const auto aborted = c.Aborted();
    EXPECT(aborted &&
           aborted->cause.event() == (signal == SIGSTOP ? Event::kSilent : Event::kLost));
    EXPECT(aborted->cause.worker() == "rank 1" && aborted->detected->rank == c.rank());
    EXPECT(std::string(aborted->cause.what()).find("Detected") == std::string::npos);
    // A stopped rank must also end, once all have noticed that it stopped.
    std::this_thread::sleep_for(std::chrono::milliseconds(signal == SIGSTOP ? 500 : 0));
    if (c.rank() == 0) kill(*victim, SIGKILL);
  });
  munmap(victim, 4096);
}

void All(int signal, const std::vector<std::pair<int, int>>& arrangements) {
  for (const auto& [ranks, hosts] : arrangements) {
    Plan plan = Arranged(ranks, hosts, As::kProcesses);
    std::string word = "its process has ended";
    if (signal == SIGSTOP) {
      plan.silence_warning_seconds = plan.silence_timeout_seconds = 5;
      word = "no sign of life for 5.0 s";
    }
    std::vector<std::function<void()>> losses;
    for (const Kind kind : {Kind::kAllReduce, Kind::kReduceScatter, Kind::kAllGather,
                            Kind::kBroadcast, Kind::kAllToAll, Kind::kSend, Kind::kBarrier}) {
      for (const Phase phase : {Phase::kFirst, Phase::kBetween}) {
        losses.push_back([=] { Lose(plan, kind, phase, signal, word); });
      }
      if (kind == Kind::kBarrier) continue;
      losses.push_back([=] { Lose(plan, kind, Phase::kMiddle, signal, word); });
    }
    InParallel(losses);
    std::printf("%d ranks on %d hosts: ok\n", ranks, hosts);
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace tfdist::testing

int main(int argc, char** argv) {
  using namespace tfdist::testing;
  const int signal = argc > 1 && argv[1] == std::string("stop") ? SIGSTOP : SIGKILL;
  return Report([&] { All(signal, Arrangements(argc, argv)); });
}
