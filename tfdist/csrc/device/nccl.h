// The NCCL functions that the core uses. They are loaded at run time, so the core can be compiled
// without NCCL, and it uses the same NCCL library as TensorFlow.
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

// ncclUniqueId: the ranks of a communicator use it to find each other.
struct UniqueId {
  char bytes[128];
};

// ncclConfig_t of NCCL 2.17 to 2.24. Newer versions have more fields. They find out from `size` and
// `version` that these fields are missing here, and use default values for them.
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

// Each function is listed as F(name, return type, parameters).
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
// Functions that not all versions of NCCL have. If the library lacks a function, its pointer in
// `Library` is null.
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
// library. The message names the missing library or function, or the required version.
// Args: library: the path of the library, or "" for the system's library. Only the first call loads
// a library; later calls ignore this argument.
const Library& Load(std::string library = "");

// Finds the functions of an NCCL library, and checks its version. Throws Error(kInvalidArgument) if
// the library is too old.
// Args: find: a function that returns the address of the NCCL function with a given name, or null
// if the library lacks it; name: the name of the library for error messages.
Library Resolve(const std::function<void*(const char*)>& find, const std::string& name);

// Returns whether NCCL allows several ranks to use the same GPU. This requires NCCL 2.30 or newer,
// and the environment variable NCCL_MULTI_RANK_GPU_ENABLE=1, which NCCL also reads.
bool LetsRanksShareAGpu(const Library& library);

// Returns the version as text, such as "2.21.5".
std::string VersionOf(int version);

// Throws Error if a call of an NCCL function has failed. The message contains NCCL's description of
// the error. The code is kUnavailable if NCCL has lost another rank, and kInternal otherwise.
// Args: function: the name of the function.
void Check(Result result, const char* function);

}  // namespace tfdist::nccl
