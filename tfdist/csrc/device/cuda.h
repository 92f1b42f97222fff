// The few functions of CUDA's driver that are used, found when the process runs: so nothing of CUDA
// is needed to compile, and what runs is the driver of the machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tfdist::cuda {

struct Context;
struct Stream;
struct Event;
struct Module;
struct Function;
using Result = int;    // CUresult
using Device = int;    // CUdevice
using Address = unsigned long long;  // CUdeviceptr

// CUipcMemHandle: tells another process of the host of an allocation.
struct IpcHandle {
  char bytes[64];
};

// Numbers of CUDA 11 to 13.
constexpr Result kSuccess = 0;
constexpr Result kNotReady = 600;              // CUDA_ERROR_NOT_READY
constexpr Result kPeerAccessIsEnabled = 704;   // CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
constexpr Result kMemoryIsRegistered = 712;    // CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
constexpr unsigned kNonBlocking = 1;           // CU_STREAM_NON_BLOCKING
constexpr unsigned kNoTiming = 2;              // CU_EVENT_DISABLE_TIMING
constexpr unsigned kPortable = 1, kMapped = 2;  // CU_MEMHOSTALLOC_PORTABLE, _DEVICEMAP; also to register
constexpr unsigned kLazyPeerAccess = 1;        // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
constexpr int kMajor = 75, kMinor = 76;        // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
constexpr int kStreamWaits = 122;  // CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
constexpr unsigned kReached = 0;   // CU_STREAM_WAIT_VALUE_GEQ: how two's complements of int64 compare
constexpr int kOldestDriver = 12000;           // as cuDriverGetVersion tells it

// CUuuid: tells GPUs apart, also between processes.
struct Uuid {
  char bytes[16];
};

// Name, what it takes. All return a Result.
#define TFDIST_CUDA(F)                                                                    \
  F(cuInit, (unsigned))                                                                   \
  F(cuDriverGetVersion, (int*))                                                           \
  F(cuGetErrorName, (Result, const char**))                                               \
  F(cuGetErrorString, (Result, const char**))                                             \
  F(cuDeviceGetCount, (int*))                                                             \
  F(cuDeviceGet, (Device*, int))                                                          \
  F(cuDeviceGetName, (char*, int, Device))                                                \
  F(cuDeviceGetUuid_v2, (Uuid*, Device))                                                  \
  F(cuDeviceGetPCIBusId, (char*, int, Device))                                            \
  F(cuDeviceGetAttribute, (int*, int, Device))                                            \
  F(cuDevicePrimaryCtxRetain, (Context**, Device))                                        \
  F(cuDevicePrimaryCtxRelease_v2, (Device))                                               \
  F(cuDeviceCanAccessPeer, (int*, Device, Device))                                        \
  F(cuCtxSetCurrent, (Context*))                                                          \
  F(cuCtxEnablePeerAccess, (Context*, unsigned))                                          \
  F(cuMemAlloc_v2, (Address*, size_t))                                                    \
  F(cuMemFree_v2, (Address))                                                              \
  F(cuMemHostAlloc, (void**, size_t, unsigned))                                           \
  F(cuMemFreeHost, (void*))                                                               \
  F(cuMemHostGetDevicePointer_v2, (Address*, void*, unsigned))                            \
  F(cuMemHostRegister_v2, (void*, size_t, unsigned))                                      \
  F(cuMemHostUnregister, (void*))                                                         \
  F(cuMemsetD32Async, (Address, unsigned, size_t, Stream*))                               \
  F(cuMemcpyAsync, (Address, Address, size_t, Stream*))                                   \
  F(cuStreamCreateWithPriority, (Stream**, unsigned, int))                                \
  F(cuCtxGetStreamPriorityRange, (int*, int*))                                            \
  F(cuStreamDestroy_v2, (Stream*))                                                        \
  F(cuStreamSynchronize, (Stream*))                                                       \
  F(cuStreamWaitEvent, (Stream*, Event*, unsigned))                                       \
  F(cuEventCreate, (Event**, unsigned))                                                   \
  F(cuEventRecord, (Event*, Stream*))                                                     \
  F(cuEventQuery, (Event*))                                                               \
  F(cuEventDestroy_v2, (Event*))                                                          \
  F(cuModuleLoadData, (Module**, const void*))                                            \
  F(cuModuleUnload, (Module*))                                                            \
  F(cuModuleGetFunction, (Function**, Module*, const char*))                              \
  F(cuLaunchKernel, (Function*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
                     unsigned, Stream*, void**, void**))                                  \
  F(cuIpcGetMemHandle, (IpcHandle*, Address))                                             \
  F(cuIpcOpenMemHandle_v2, (Address*, IpcHandle, unsigned))                               \
  F(cuIpcCloseMemHandle, (Address))
// Null where there is none.
#define TFDIST_CUDA_IF_PRESENT(F) F(cuStreamWaitValue64_v2, (Stream*, Address, uint64_t, unsigned))

struct Driver {
#define TFDIST_MEMBER(name, arguments) Result(*name) arguments = nullptr;
  TFDIST_CUDA(TFDIST_MEMBER)
  TFDIST_CUDA_IF_PRESENT(TFDIST_MEMBER)
#undef TFDIST_MEMBER
  int version = 0;  // such as 12040
};

// The same for the whole process; the first call tells which library, "" for the system's.
// Throws Error(kInvalidArgument) if there is none, or none that is usable, and says what is missing.
const Driver& Load(const std::string& library = "");

// Memory as the driver calls it, and as code does.
inline Address AddressOf(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }
template <typename T>
T* PointerTo(Address address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// Throws Error(kInternal) with what the driver calls the error, unless all is well.
void Check(Result result, const char* function);

}  // namespace tfdist::cuda
