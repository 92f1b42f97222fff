#include "collective/transfer.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>

#include "error.h"
#include "reduce/reduce.h"

namespace tfdist {

Members Everyone(const Topology& topology) {
  Members members;
  for (int rank = 0; rank < topology.size; ++rank) members.ranks.push_back(rank);
  members.me = topology.rank;
  return members;
}

Members Counterparts(const Topology& topology) {
  Members members;
  for (const auto& host : topology.hosts) {
    members.ranks.push_back(host[static_cast<size_t>(topology.my_place())]);
  }
  members.me = topology.host_of[static_cast<size_t>(topology.rank)];
  return members;
}

namespace {

// The maximum size of a result. No buffer can be larger, and the sum of two such sizes does not
// overflow.
constexpr size_t kMaxBytes = PTRDIFF_MAX;

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

// Returns the size of each rank's rows in bytes, and adds all of these sizes to `*total`.
std::vector<size_t> Bytes(const Topology& topology, const Operation& operation,
                          const std::vector<size_t>& rows, size_t* total) {
  std::vector<size_t> bytes;
  // A row with a size of 0 bytes takes no memory. But the number of such rows must also be limited,
  // because it must fit in a dimension of the result.
  const size_t row = std::max<size_t>(operation.row_bytes, 1);
  size_t left = kMaxBytes;
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

std::vector<size_t> AllocateResult(const Topology& topology, Operation& operation,
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

size_t Transfer::Begin(int j) const {
  return std::accumulate(part_bytes.begin(), part_bytes.begin() + j, size_t{0});
}

void ReducePart(const Transfer& t, int me, size_t begin, size_t bytes,
                const std::vector<const char*>& others) {
  const DType out_type = t.widens ? PartialType(t.type, t.op) : t.type;
  const size_t element = SizeOf(t.type), wider = SizeOf(out_type) / element;
  const size_t in_begin = t.InBegin(me) + begin, out_begin = t.OutBegin(me) + begin * wider;
  std::vector<const void*> inputs(others.size());
  for (size_t done = 0; done < bytes;) {
    const auto in = t.in.At(in_begin + done);
    const auto out = t.out.At(out_begin + done * wider);
    const size_t some = std::min({in.bytes, out.bytes / wider, bytes - done});
    for (size_t j = 0; j < others.size(); ++j) {
      inputs[j] = j == static_cast<size_t>(me) ? in.data : others[j] + done;
    }
    Reduce({t.type, t.op, t.divisor, inputs.data(), static_cast<int>(inputs.size()), some / element,
            out.data, out_type});
    done += some;
  }
}

void CopyPart(const Transfer& t, int me, size_t begin, size_t bytes) {
  size_t at = t.OutBegin(me) + begin;
  t.in.ForEach(t.InBegin(me) + begin, bytes, [&](const char* from, size_t some) {
    t.out.ForEach(at, some, [&](char* to, size_t stretch) {
      if (to != from) std::memmove(to, from, stretch);
      from += stretch;
    });
    at += some;
  });
}

std::vector<size_t> CutEvenly(size_t bytes, size_t element, int owners, int participants) {
  const size_t elements = bytes / element;
  const auto n = static_cast<size_t>(owners);
  std::vector<size_t> parts(static_cast<size_t>(participants), 0);
  for (size_t j = 0; j < n; ++j) {
    parts[j] = (elements * (j + 1) / n - elements * j / n) * element;
  }
  return parts;
}

}  // namespace tfdist
