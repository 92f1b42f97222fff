// One rank of two, without the other: what comes from a peer is what a test has laid ready.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collective/collectives.h"
#include "error.h"
#include "transport/fabric.h"

namespace tfdist::testing {

constexpr size_t kCount = 24;  // floats that each rank brings, for each rank where that matters

// A wait that lasts has failed: all that will ever come is there.
struct Impatient : Guard {
  void Check() override { throw Error(Code::kUnavailable, "It would wait for ever."); }
};

// Rank 0.
struct Alone {
  // The other is on another host.
  explicit Alone(int descriptor);
  // The other is on this host.
  explicit Alone(std::unique_ptr<Segment> segment);

  Impatient guard;
  Recorder recorder{{0, 0}};
  Fabric fabric;
};

// What rank 0 was asked for; where it allocates, without knowing the other's size.
struct Request {
  Request(Kind kind, size_t count, bool allocates);

  std::vector<float> in, out;
  std::vector<char> room;
  Operation operation;
};

// What the other says where it has joined the same.
Fingerprint Counterpart(const Fingerprint& fingerprint);

// Runs it; returns what was thrown, or nothing. Anything but an Error is thrown on.
std::string Run(Fabric& fabric, Operation& operation, Algorithm algorithm);

// Ends the program with a message, unless the condition holds.
void Expect(bool condition, const std::string& what);

// The bytes of a number.
std::string Number(uint64_t value);

}  // namespace tfdist::testing
