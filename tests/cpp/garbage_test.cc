// A rank that sends bytes of no protocol in a running group: an error that names it on every rank.
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>

#include "cpp/calls.h"

namespace tfdist::testing {
namespace {

// Copies of rank 1's connections, to write to without its knowledge.
class Intruder {
 public:
  explicit Intruder(const std::vector<int>& descriptors) {
    for (const int descriptor : descriptors) {
      if (descriptor >= 0) copies_.push_back(dup(descriptor));
    }
  }
  ~Intruder() {
    for (const int copy : copies_) close(copy);
  }
  void Write() const {
    std::string bytes;
    for (int i = 0; i < 1000; ++i) bytes += static_cast<char>(0xa5 + 7 * i);
    for (const int copy : copies_) {
      // Ranks that have learned of the failure from others are closing already.
      (void)!send(copy, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    }
  }

 private:
  std::vector<int> copies_;
};

// Rank 1 sends garbage after `rounds` valid collectives.
void Intrude(const Plan& plan, bool control, Kind kind, int rounds) {
  Wiring wiring(plan);
  std::vector<Communicator::Setup> setups;
  for (int rank = 0; rank < plan.ranks; ++rank) setups.push_back(wiring.Take(rank));
  const Intruder intruder(control ? setups[1].control : setups[1].data);
  OnEachThread(std::move(setups), [&](Communicator& c) {
    const Code code = control ? Code::kUnavailable : Code::kMismatch;
    const std::string word = control ? "rank 1 is lost: it sent a malformed frame" : "rank 1";
    ExpectError(
        [&] {
          for (int round = 0;; ++round) {
            if (c.rank() == 1 && round == rounds) intruder.Write();
            Do(c, kind, 10);
          }
        },
        code, {word});
  });
}

void All() {
  for (const auto& [ranks, hosts] : kArrangements) {
    const Plan plan = Arranged(ranks, hosts, As::kThreads);
    for (const Kind kind : kKindsOfGroups) {
      for (const int rounds : {0, 3}) {
        Intrude(plan, true, kind, rounds);
        if (hosts > 1) Intrude(plan, false, kind, rounds);
      }
    }
    std::printf("%d ranks on %d hosts: ok\n", ranks, hosts);
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace tfdist::testing

int main() { return tfdist::testing::Report(tfdist::testing::All); }
