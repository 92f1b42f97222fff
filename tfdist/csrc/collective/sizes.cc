#include "collective/sizes.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "error.h"

namespace tfdist {
namespace {

// No memory is larger, and no sum of such sizes overflows.
constexpr size_t kMostBytes = PTRDIFF_MAX;

[[noreturn]] void Refuse(const Topology& topology, const Operation& operation, size_t rank,
                         size_t rows, const std::string& why) {
  throw Error(Code::kMismatch,
              "In " + Describe(operation.fingerprint) + " " + topology.names[rank] + " gives " +
                  std::to_string(rows) + " rows" + why +
                  ". Run one program, with the same arguments and data, on all ranks.");
}

void CheckExpected(const Topology& topology, const Operation& operation,
                   const std::vector<size_t>& rows) {
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    const size_t expected = operation.received_rows[rank];
    if (rows[rank] == expected) continue;
    Refuse(topology, operation, rank, rows[rank],
           " where " + topology.names[static_cast<size_t>(topology.rank)] + " expects " +
               std::to_string(expected));
  }
}

// The bytes of each rank's rows.
std::vector<size_t> Bytes(const Topology& topology, const Operation& operation,
                          const std::vector<size_t>& rows, size_t* total) {
  std::vector<size_t> bytes;
  // Empty rows take no memory, but their number is the size of an axis.
  const size_t row = std::max<size_t>(operation.row_bytes, 1);
  size_t left = kMostBytes;
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    if (rows[rank] > left / row) {
      Refuse(topology, operation, rank, rows[rank], ", more than any memory holds");
    }
    left -= rows[rank] * row;
    bytes.push_back(rows[rank] * operation.row_bytes);
    *total += bytes.back();
  }
  return bytes;
}

}  // namespace

std::vector<size_t> MakeRoom(const Topology& topology, Operation& operation,
                             const std::vector<size_t>& rows) {
  if (!operation.allocate) CheckExpected(topology, operation, rows);
  size_t total = 0;
  std::vector<size_t> bytes = Bytes(topology, operation, rows, &total);
  if (!operation.allocate) return bytes;
  const std::string here = topology.names[static_cast<size_t>(topology.rank)] +
                           " has no room for the " + std::to_string(total) + " bytes of " +
                           Describe(operation.fingerprint);
  try {
    operation.out = operation.allocate(rows);
  } catch (const std::exception& error) {
    throw Error(Code::kInternal, here + ": " + error.what());
  }
  if (operation.out.bytes() != total) throw Error(Code::kInternal, here + ".");
  return bytes;
}

}  // namespace tfdist
