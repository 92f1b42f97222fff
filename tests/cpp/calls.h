// Collectives of any kind as tests call them, and the errors that are to come of them.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cpp/team.h"

namespace tfdist::testing {

constexpr Kind kKindsOfGroups[] = {Kind::kAllReduce, Kind::kReduceScatter, Kind::kAllGather,
                                   Kind::kBroadcast, Kind::kAllToAll,      Kind::kBarrier};

// A collective over `count` elements a rank, from memory of its own.
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

// Runs what must fail, and checks how, and that the message has all these words.
void ExpectError(const std::function<void()>& what, Code code,
                 const std::vector<std::string>& words);

// The arrangements that faults are tried on: ranks, and the hosts that they are spread over.
Plan Arranged(int ranks, int hosts, As as);
constexpr std::pair<int, int> kArrangements[] = {{2, 1}, {2, 2}, {3, 1}, {4, 2}};
// Where the last argument is "quick", the smallest and the largest only; where it is "one", one.
std::vector<std::pair<int, int>> Arrangements(int argc, char** argv);

// Runs a program's tests; what they throw is its output.
int Report(const std::function<void()>& tests);

}  // namespace tfdist::testing
