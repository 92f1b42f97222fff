#include "collective/sizes.h"

#include <cstdint>
#include <string>

#include "error.h"

namespace tfdist {
namespace {

// No memory is larger, and no sum of such sizes overflows.
constexpr size_t kMostBytes = PTRDIFF_MAX;

[[noreturn]] void Refuse(const Topology& topology, const Operation& operation, size_t rank,
                         size_t bytes, const std::string& why) {
  const size_t element = SizeOf(operation.fingerprint.type);
  throw Error(Code::kMismatch,
              "In " + Describe(operation.fingerprint) + " " + topology.names[rank] + " gives " +
                  std::to_string(bytes / element) + " elements" + why +
                  ". Run one program, with the same arguments and data, on all ranks.");
}

void CheckExpected(const Topology& topology, const Operation& operation,
                   const std::vector<size_t>& bytes) {
  const size_t element = SizeOf(operation.fingerprint.type);
  for (size_t rank = 0; rank < bytes.size(); ++rank) {
    const size_t expected = operation.received_bytes[rank];
    if (bytes[rank] == expected) continue;
    Refuse(topology, operation, rank, bytes[rank],
           " where " + topology.names[static_cast<size_t>(topology.rank)] + " expects " +
               std::to_string(expected / element));
  }
}

size_t Total(const Topology& topology, const Operation& operation,
             const std::vector<size_t>& bytes) {
  const size_t element = SizeOf(operation.fingerprint.type);
  size_t total = 0;
  for (size_t rank = 0; rank < bytes.size(); ++rank) {
    if (bytes[rank] % element != 0) {
      Refuse(topology, operation, rank, bytes[rank], " and a part of one");
    }
    if (bytes[rank] > kMostBytes - total) {
      Refuse(topology, operation, rank, bytes[rank], ", more than any memory holds");
    }
    total += bytes[rank];
  }
  return total;
}

}  // namespace

void MakeRoom(const Topology& topology, Operation& operation, const std::vector<size_t>& bytes) {
  if (!operation.allocate) return CheckExpected(topology, operation, bytes);
  const size_t total = Total(topology, operation, bytes);
  const std::string here = topology.names[static_cast<size_t>(topology.rank)] +
                           " has no room for the " + std::to_string(total) + " bytes of " +
                           Describe(operation.fingerprint);
  try {
    operation.out = operation.allocate(bytes);
  } catch (const std::exception& error) {
    throw Error(Code::kInternal, here + ": " + error.what());
  }
  if (operation.out.bytes() != total) throw Error(Code::kInternal, here + ".");
}

}  // namespace tfdist
