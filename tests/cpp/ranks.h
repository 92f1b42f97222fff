// Ranks for tests: threads of this process, or forked processes.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "communicator.h"

namespace tfdist::testing {

enum class As { kThreads, kProcesses };

struct Plan {
  int ranks = 2;
  int hosts = 1;  // the ranks are distributed over this many hosts, in turn
  As as = As::kThreads;
  std::string algorithm;
  std::optional<DevicePath::Setup> device;
  std::vector<std::string> algorithms;  // one per rank, if they differ
  // Long enough not to matter on a slow machine.
  double silence_warning_seconds = 60;
  double silence_timeout_seconds = 60;
  double stall_seconds = 60;
  double timeout_seconds = 600;
};

// The failure of a test.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

#define EXPECT(condition)                                                                       \
  do {                                                                                          \
    if (!(condition)) {                                                                         \
      throw ::tfdist::testing::Failure(std::string(__FILE__) + ":" + std::to_string(__LINE__) + \
                                       ": " #condition);                                        \
    }                                                                                           \
  } while (false)

// The connections of one group's ranks, created before they start.
class Wiring {
 public:
  explicit Wiring(const Plan& plan);
  ~Wiring();
  // One rank's setup; closes the ends of the other ranks if ranks are processes.
  Communicator::Setup Take(int rank);

 private:
  const Plan plan_;
  std::vector<std::vector<int>> control_;  // [rank][other]
  std::vector<std::vector<int>> data_;
  std::vector<int> segments_;    // a descriptor per host
  std::vector<void*> memories_;  // the same, mapped once, for threads
  size_t segment_bytes_;
};

// Runs `body` on every rank and throws the first failure. For processes, a failure is its text.
void OnEachRank(const Plan& plan, const std::function<void(Communicator&)>& body);

// The same in threads, for setups that a test has modified.
void OnEachThread(std::vector<Communicator::Setup> setups,
                  const std::function<void(Communicator&)>& body);

// The same in processes. Rank `may_die` may be killed or fail without failing the test.
void OnEachProcess(const Plan& plan, int may_die, const std::function<void(Communicator&)>& body);

// Runs each test in its own process, all concurrently; for tests that mostly wait.
void InParallel(const std::vector<std::function<void()>>& tests);

}  // namespace tfdist::testing
