// The NCCL functions that the core uses. They are loaded at run time. The compilation therefore
// does not need NCCL, and the process uses the same NCCL as TensorFlow.
#pragma once

#include <climits>
#include <cstddef>
#include <functional>
#include <string>

#include "device/gpu.h"

namespace tfdist::nccl {

struct Comm;
struct Window;
using cuda::Stream;
using Result = int;  // ncclResult_t
using Type = int;    // ncclDataType_t
using Op = int;      // ncclRedOp_t

// ncclUniqueId: lets the ranks of a communicator find each other.
struct UniqueId {
  char bytes[128];
};

// ncclConfig_t as in NCCL 2.17 to 2.24. Newer versions of NCCL read its size and version, and set
// their additional fields themselves.
struct Config {
  static constexpr int kUnset = INT_MIN;  // NCCL_CONFIG_UNDEF_INT

  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;  // NCCL_API_MAGIC
  unsigned version = 22100;
  int blocking = kUnset;
  int cluster_size = kUnset;      // cgaClusterSize
  int min_blocks = kUnset;        // minCTAs
  int max_blocks = kUnset;        // maxCTAs
  const char* network = nullptr;  // netName
  int split_share = kUnset;       // splitShare
};
static_assert(sizeof(Config) == 48, "a layout that NCCL does not know");

constexpr Result kSuccess = 0, kInvalidUsage = 5, kRemoteError = 6, kInProgress = 7;
constexpr Type kInt8 = 0, kUint8 = 1, kInt32 = 2, kInt64 = 4;
constexpr Type kFloat16 = 6, kFloat32 = 7, kFloat64 = 8, kBfloat16 = 9;
constexpr Op kSum = 0, kProduct = 1, kMax = 2, kMin = 3, kMean = 4;
constexpr int kSymmetric = 1;   // NCCL_WIN_COLL_SYMMETRIC
constexpr int kOldest = 22100;  // the version that TensorFlow 2.18 uses

// For each function: its name, return type and parameters.
#define TFDIST_NCCL(F)                                                                 \
  F(ncclGetVersion, Result, (int*))                                                    \
  F(ncclGetErrorString, const char*, (Result))                                         \
  F(ncclGetLastError, const char*, (Comm*))                                            \
  F(ncclGetUniqueId, Result, (UniqueId*))                                              \
  F(ncclCommInitRankConfig, Result, (Comm**, int, UniqueId, int, Config*))             \
  F(ncclCommCount, Result, (Comm*, int*))                                              \
  F(ncclCommGetAsyncError, Result, (Comm*, Result*))                                   \
  F(ncclCommFinalize, Result, (Comm*))                                                 \
  F(ncclCommDestroy, Result, (Comm*))                                                  \
  F(ncclCommAbort, Result, (Comm*))                                                    \
  F(ncclGroupStart, Result, ())                                                        \
  F(ncclGroupEnd, Result, ())                                                          \
  F(ncclAllReduce, Result, (const void*, void*, size_t, Type, Op, Comm*, Stream*))     \
  F(ncclReduceScatter, Result, (const void*, void*, size_t, Type, Op, Comm*, Stream*)) \
  F(ncclAllGather, Result, (const void*, void*, size_t, Type, Comm*, Stream*))         \
  F(ncclBroadcast, Result, (const void*, void*, size_t, Type, int, Comm*, Stream*))    \
  F(ncclSend, Result, (const void*, size_t, Type, int, Comm*, Stream*))                \
  F(ncclRecv, Result, (void*, size_t, Type, int, Comm*, Stream*))
// These functions are null in versions of NCCL that lack them.
#define TFDIST_NCCL_IF_PRESENT(F)                                          \
  F(ncclMemAlloc, Result, (void**, size_t))                                \
  F(ncclMemFree, Result, (void*))                                          \
  F(ncclCommRegister, Result, (const Comm*, void*, size_t, void**))        \
  F(ncclCommDeregister, Result, (const Comm*, void*))                      \
  F(ncclCommWindowRegister, Result, (Comm*, void*, size_t, Window**, int)) \
  F(ncclCommWindowDeregister, Result, (Comm*, Window*))

struct Library {
#define TFDIST_MEMBER(name, result, arguments) result(*name) arguments = nullptr;
  TFDIST_NCCL(TFDIST_MEMBER)
  TFDIST_NCCL_IF_PRESENT(TFDIST_MEMBER)
#undef TFDIST_MEMBER
  int version = 0;  // such as 22105 for 2.21.5
};

// Returns the NCCL library of this process. Throws Error(kInvalidArgument) if there is no usable
// library. The message names the missing function or library.
// Args: library: the path of the library, or "" for the system's library. Only the first call uses
// this argument.
const Library& Load(std::string library = "");

// Loads the functions of a library.
// Args: find: returns the address of a function, or null if the library lacks it; name: the name of
// the library in messages.
Library Resolve(const std::function<void*(const char*)>& find, const std::string& name);

// Returns whether several ranks can share a GPU. This requires NCCL 2.30 or newer, and NCCL's own
// setting NCCL_MULTI_RANK_GPU_ENABLE=1.
bool LetsRanksShareAGpu(const Library& library);

// Returns the version as text, such as "2.21.5".
std::string VersionOf(int version);

// Throws Error with NCCL's message if a call has failed. The code is kUnavailable if a rank is
// lost, and kInternal otherwise.
void Check(Result result, const char* function);

}  // namespace tfdist::nccl
