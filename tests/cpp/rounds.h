// Repeats tests, and checks that they leave nothing behind.
#pragma once

#include <functional>

namespace tfdist::testing {

// Compares the resources that this process holds after the rounds with those before. The first
// round does not count, since it may allocate permanently. Args: closed: how many descriptors that
// were open before a round it closes.
void Repeat(int rounds, const std::function<void(int round)>& round, int closed = 0);
constexpr int kFirstRounds = 12;

}  // namespace tfdist::testing
