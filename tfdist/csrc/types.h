// The types of values and operations, and the fingerprints of operations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "error.h"

namespace tfdist {

// The types of the values that collectives support.
enum class DType : uint8_t {
  kBool,
  kUint8,
  kInt8,
  kInt32,
  kInt64,
  kFloat16,
  kBfloat16,
  kFloat32,
  kFloat64,
};
constexpr int kDTypes = 9;

enum class ReduceOp : uint8_t { kSum, kMean, kMin, kMax, kProduct };
constexpr int kReduceOps = 5;

enum class Kind : uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kAllToAll,
  kBarrier,
  kSend,
  kReceive,
};
constexpr int kKinds = 8;

constexpr size_t SizeOf(DType type) {
  switch (type) {
    case DType::kBool:
    case DType::kUint8:
    case DType::kInt8:
      return 1;
    case DType::kFloat16:
    case DType::kBfloat16:
      return 2;
    case DType::kInt32:
    case DType::kFloat32:
      return 4;
    case DType::kInt64:
    case DType::kFloat64:
      return 8;
  }
  return 1;
}

constexpr bool IsFloating(DType type) { return type >= DType::kFloat16; }

// Returns the type in which partial results are stored. A partial result is the reduction of the
// values of some ranks, which will be reduced further. The partial results of half types are
// float32, so that only the final result is rounded to the half type. The partial results of a
// float32 mean are float64: the sum of equal float32 values is then exact, so their mean is exactly
// the common value.
constexpr DType PartialType(DType type, ReduceOp op) {
  if (type == DType::kFloat16 || type == DType::kBfloat16) return DType::kFloat32;
  return type == DType::kFloat32 && op == ReduceOp::kMean ? DType::kFloat64 : type;
}

const char* NameOf(DType type);
const char* NameOf(ReduceOp op);
const char* NameOf(Kind kind);

// Describes the collective or message that a rank has joined. The ranks compare their fingerprints
// to detect that they have called different operations.
//
// A fingerprint is trivially copyable, so that it can be sent over a socket or stored in shared
// memory. If it has arrived from another rank, it may contain arbitrary bytes. `Describe` and
// `Agree` accept any bytes.
struct Fingerprint {
  // The number of the collective in its group. For a message, its number among the messages from
  // the sender to the receiver.
  uint64_t sequence = 0;
  uint64_t shapes = 0;  // a hash of all shapes and of other values that must be equal
  uint64_t count = 0;   // the number of elements in all tensors
  int32_t root = 0;     // the root of a broadcast
  uint16_t tensors = 0;
  Kind kind = Kind::kBarrier;
  DType type = DType::kUint8;
  ReduceOp op = ReduceOp::kSum;
  // The number of dimensions of the first tensor, or 255 if it has more than 4.
  uint8_t dimensions = 0;
  // For an all-reduce, the algorithm that the setup of the communicator selects.
  uint8_t algorithm = 0;
  uint8_t failures = 0;  // the number of this rank's failed steps, modulo 256
  uint32_t codec = 0;    // a hash of the compression settings; 0 without compression
  int64_t dims[4] = {};
  uint8_t on_device = 0;  // 1 if the operation uses device memory, otherwise 0
  char name[55] = {};

  void SetName(const std::string& text);
  // Adds a tensor with the dimensions `dims`.
  void AddShape(const std::vector<int64_t>& dims);
  // Adds a tensor that consists of rows. Its first dimension is the number of rows. `Agree` ignores
  // this dimension, because ranks may have different numbers of rows.
  void AddRows(const std::vector<int64_t>& dims);
};
static_assert(sizeof(Fingerprint) == 128 && std::is_trivially_copyable_v<Fingerprint>);

// Returns whether two ranks have joined the same operation. A send and the matching receive count
// as the same operation.
bool Agree(const Fingerprint& mine, const Fingerprint& theirs);

// Returns a description for error messages, such as "all_reduce 'gradients' float32[3,5] sum".
std::string Describe(const Fingerprint& fingerprint);

// Compares the numbers of failed steps of two ranks, and returns whether `failures` is larger than
// `others`. Both numbers are known only modulo 256.
bool FailedMore(uint8_t failures, uint8_t others);

// Returns the error for two ranks that have joined different operations. Both ranks construct the
// same error. If the operations differ only in the number of failed steps, one rank has continued
// after a step that failed only there, and the code of the error is kUnavailable. Otherwise, the
// code is kMismatch.
Error Disagreement(const std::string& rank, const Fingerprint& joined,
                   const std::string& other_rank, const Fingerprint& other_joined);

}  // namespace tfdist
