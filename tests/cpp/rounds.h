// What is done again and again, and leaves nothing behind.
#pragma once

#include <functional>

namespace tfdist::testing {

// Compares what this process holds after so many rounds with what it held before them, without the
// first, which may come to hold more.
// Args: closed: how many descriptors that were open before a round closes.
void Repeat(int rounds, const std::function<void(int round)>& round, int closed = 0);
constexpr int kFirstRounds = 12;

}  // namespace tfdist::testing
