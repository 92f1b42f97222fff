// One of two ranks, without the other: a test provides the peer's data in advance.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collective/collectives.h"
#include "error.h"
#include "transport/fabric.h"

namespace tfdist::testing {

// Floats per rank, or per pair of ranks if the collective distinguishes them.
constexpr size_t kCount = 24;

// Fails any wait that lasts: all data of the peer are already available.
struct Impatient : Guard {
  void Check() override { throw Error(Code::kUnavailable, "It would wait for ever."); }
};

// Rank 0.
struct Alone {
  // For a peer on another host.
  explicit Alone(int descriptor);
  // For a peer on this host.
  explicit Alone(std::unique_ptr<Segment> segment);

  Impatient guard;
  Recorder recorder{{0, 0}};
  Fabric fabric;
};

// An operation of rank 0. If it allocates, it does not know the peer's size.
struct Request {
  Request(Kind kind, size_t count, bool allocates);

  std::vector<float> in, out;
  std::vector<char> room;
  Operation operation;
};

// The fingerprint of a peer that has joined the same operation.
Fingerprint Counterpart(const Fingerprint& fingerprint);

// Runs it, and returns the message of the Error, or nothing. Other exceptions propagate.
std::string Run(Fabric& fabric, Operation& operation, Algorithm algorithm);

// Ends the program with a message, unless the condition holds.
void Expect(bool condition, const std::string& what);

// The bytes of a number.
std::string Number(uint64_t value);

}  // namespace tfdist::testing
