// Collectives of any kind for tests, and checks of the expected errors.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cpp/ranks.h"

namespace tfdist::testing {

constexpr Kind kKindsOfGroups[] = {Kind::kAllReduce, Kind::kReduceScatter, Kind::kAllGather,
                                   Kind::kBroadcast, Kind::kAllToAll,      Kind::kBarrier};

// A collective of `count` elements per rank, with its own memory.
struct Call {
  Call(Communicator& c, Kind kind, size_t count, const std::string& name = "x",
       DType type = DType::kFloat32);

  std::vector<char> memory;
  Operation operation;
};

void Do(Communicator& c, Kind kind, size_t count, const std::string& name = "x",
        DType type = DType::kFloat32);

// A message from rank 1 to rank 0.
void DoMessage(Communicator& c, size_t count, const std::string& name = "x",
               DType type = DType::kFloat32);

// Runs code that must fail, and checks the error's code and that its message contains all words.
void ExpectError(const std::function<void()>& what, Code code,
                 const std::vector<std::string>& words);

// The arrangements for tests of failures: numbers of ranks and of hosts.
Plan Arranged(int ranks, int hosts, As as);
constexpr std::pair<int, int> kArrangements[] = {{2, 1}, {2, 2}, {3, 1}, {4, 2}};
// Only the smallest and the largest if the last argument is "quick"; one if it is "one".
std::vector<std::pair<int, int>> Arrangements(int argc, char** argv);

// Runs a program's tests, and prints their exceptions.
int Report(const std::function<void()>& tests);

}  // namespace tfdist::testing
