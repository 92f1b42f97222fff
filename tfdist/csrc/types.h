// Types of values, and fingerprints of operations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "error.h"

namespace tfdist {

// The element types and reductions that collectives support.
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

// The type of partial results, which are reduced further. Half types are rounded once, at the end.
// The sum of equal float32 values is exact, so their mean equals that value.
constexpr DType PartialType(DType type, ReduceOp op) {
  if (type == DType::kFloat16 || type == DType::kBfloat16) return DType::kFloat32;
  return type == DType::kFloat32 && op == ReduceOp::kMean ? DType::kFloat64 : type;
}

const char* NameOf(DType type);
const char* NameOf(ReduceOp op);
const char* NameOf(Kind kind);

// A rank's description of the collective it has joined, compared with the other ranks'
// descriptions.
//
// A plain block of bytes, so that it fits shared memory and sockets. A peer's fingerprint may hold
// any bytes: only `Describe` and `Agree` read it.
struct Fingerprint {
  uint64_t sequence = 0;  // of the collective in its group; of the message between a pair
  uint64_t shapes = 0;    // a hash of all shapes and other values that must agree
  uint64_t count = 0;     // elements, over all tensors
  int32_t root = 0;       // of a broadcast
  uint16_t tensors = 0;
  Kind kind = Kind::kBarrier;
  DType type = DType::kUint8;
  ReduceOp op = ReduceOp::kSum;
  uint8_t dimensions = 0;  // of the first tensor; 255 if it has more than 4
  uint8_t algorithm = 0;   // the forced algorithm of an all-reduce
  uint8_t failures = 0;    // the rank's failed steps, modulo 256
  uint32_t codec = 0;      // a hash of the compression; 0 for none
  int64_t dims[4] = {};
  uint8_t on_device = 0;  // 1 if it moves device memory
  char name[55] = {};

  void SetName(const std::string& text);
  // Adds a tensor; `dims` are its dimensions.
  void AddShape(const std::vector<int64_t>& dims);
  // Adds a tensor; its first dimension may differ between ranks.
  void AddRows(const std::vector<int64_t>& dims);
};
static_assert(sizeof(Fingerprint) == 128 && std::is_trivially_copyable_v<Fingerprint>);

// Whether the fingerprints match; a send matches a receive.
bool Agree(const Fingerprint& mine, const Fingerprint& theirs);

// "all_reduce 'gradients' float32[3,5] sum", for messages.
std::string Describe(const Fingerprint& fingerprint);

// Whether a rank has had more failed steps than another one.
bool FailedMore(uint8_t failures, uint8_t others);

// The error for two ranks that joined different collectives; the same on both sides. It is
// kMismatch, or kUnavailable if one rank's step has failed and that rank will report the cause.
Error Disagreement(const std::string& rank, const Fingerprint& joined,
                   const std::string& other_rank, const Fingerprint& other_joined);

}  // namespace tfdist
