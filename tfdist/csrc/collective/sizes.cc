#include "collective/sizes.h"

#include <string>

#include "error.h"

namespace tfdist {

void CheckSizes(const Topology& topology, const Operation& operation,
                const std::vector<size_t>& bytes) {
  for (size_t rank = 0; rank < bytes.size(); ++rank) {
    if (bytes[rank] == operation.received_bytes[rank]) continue;
    const size_t element = SizeOf(operation.fingerprint.type);
    throw Error(Code::kMismatch,
                "In " + Describe(operation.fingerprint) + " " + topology.names[rank] + " gives " +
                    std::to_string(bytes[rank] / element) + " elements where " +
                    topology.names[static_cast<size_t>(topology.rank)] + " expects " +
                    std::to_string(operation.received_bytes[rank] / element) +
                    ". Run one program, with the same arguments and data, on all ranks.");
  }
}

}  // namespace tfdist
