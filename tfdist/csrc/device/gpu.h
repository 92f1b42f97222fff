// The CUDA driver, loaded at run time: GPUs, memory and modules.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include "error.h"

// The CUDA driver functions in use, loaded at run time. Compilation needs no part of CUDA, and the
// machine's own driver is used.

namespace tfdist::cuda {

struct Context;
struct Stream;
struct Event;
struct Module;
struct Function;
using Result = int;                  // CUresult
using Device = int;                  // CUdevice
using Address = unsigned long long;  // CUdeviceptr

// CUipcMemHandle: lets another process of the host open an allocation.
struct IpcHandle {
  char bytes[64];
};

// Constants of CUDA 11 to 13.
constexpr Result kSuccess = 0;
constexpr Result kNotReady = 600;             // CUDA_ERROR_NOT_READY
constexpr Result kPeerAccessIsEnabled = 704;  // CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
constexpr Result kMemoryIsRegistered = 712;   // CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
constexpr unsigned kNonBlocking = 1;          // CU_STREAM_NON_BLOCKING
constexpr unsigned kNoTiming = 2;             // CU_EVENT_DISABLE_TIMING
// CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP; the same numbers register memory.
constexpr unsigned kPortable = 1, kMapped = 2;
constexpr unsigned kLazyPeerAccess = 1;  // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
constexpr int kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
constexpr int kStreamWaits = 122;        // CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
constexpr unsigned kReached =
    0;  // CU_STREAM_WAIT_VALUE_GEQ: until the difference, as an int64, is not negative
constexpr int kOldestDriver = 12000;  // as returned by cuDriverGetVersion

// CUuuid: identifies a GPU across processes.
struct Uuid {
  char bytes[16];
};

// Name and parameters. All return a Result.
#define TFDIST_CUDA(F)                                                                      \
  F(cuInit, (unsigned))                                                                     \
  F(cuDriverGetVersion, (int*))                                                             \
  F(cuGetErrorName, (Result, const char**))                                                 \
  F(cuGetErrorString, (Result, const char**))                                               \
  F(cuDeviceGetCount, (int*))                                                               \
  F(cuDeviceGet, (Device*, int))                                                            \
  F(cuDeviceGetName, (char*, int, Device))                                                  \
  F(cuDeviceGetUuid_v2, (Uuid*, Device))                                                    \
  F(cuDeviceGetPCIBusId, (char*, int, Device))                                              \
  F(cuDeviceGetAttribute, (int*, int, Device))                                              \
  F(cuDevicePrimaryCtxRetain, (Context**, Device))                                          \
  F(cuDevicePrimaryCtxRelease_v2, (Device))                                                 \
  F(cuDeviceCanAccessPeer, (int*, Device, Device))                                          \
  F(cuCtxSetCurrent, (Context*))                                                            \
  F(cuCtxEnablePeerAccess, (Context*, unsigned))                                            \
  F(cuMemAlloc_v2, (Address*, size_t))                                                      \
  F(cuMemFree_v2, (Address))                                                                \
  F(cuMemHostAlloc, (void**, size_t, unsigned))                                             \
  F(cuMemFreeHost, (void*))                                                                 \
  F(cuMemHostGetDevicePointer_v2, (Address*, void*, unsigned))                              \
  F(cuMemHostRegister_v2, (void*, size_t, unsigned))                                        \
  F(cuMemHostUnregister, (void*))                                                           \
  F(cuMemsetD32Async, (Address, unsigned, size_t, Stream*))                                 \
  F(cuMemcpyAsync, (Address, Address, size_t, Stream*))                                     \
  F(cuStreamCreateWithPriority, (Stream**, unsigned, int))                                  \
  F(cuCtxGetStreamPriorityRange, (int*, int*))                                              \
  F(cuStreamDestroy_v2, (Stream*))                                                          \
  F(cuStreamSynchronize, (Stream*))                                                         \
  F(cuStreamWaitEvent, (Stream*, Event*, unsigned))                                         \
  F(cuEventCreate, (Event**, unsigned))                                                     \
  F(cuEventRecord, (Event*, Stream*))                                                       \
  F(cuEventQuery, (Event*))                                                                 \
  F(cuEventDestroy_v2, (Event*))                                                            \
  F(cuModuleLoadData, (Module**, const void*))                                              \
  F(cuModuleUnload, (Module*))                                                              \
  F(cuModuleGetFunction, (Function**, Module*, const char*))                                \
  F(cuLaunchKernel, (Function*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
                     unsigned, Stream*, void**, void**))                                    \
  F(cuIpcGetMemHandle, (IpcHandle*, Address))                                               \
  F(cuIpcOpenMemHandle_v2, (Address*, IpcHandle, unsigned))                                 \
  F(cuIpcCloseMemHandle, (Address))
// Null if the driver lacks the function.
#define TFDIST_CUDA_IF_PRESENT(F) F(cuStreamWaitValue64_v2, (Stream*, Address, uint64_t, unsigned))

struct Driver {
#define TFDIST_MEMBER(name, arguments) Result(*name) arguments = nullptr;
  TFDIST_CUDA(TFDIST_MEMBER)
  TFDIST_CUDA_IF_PRESENT(TFDIST_MEMBER)
#undef TFDIST_MEMBER
  int version = 0;  // such as 12040
};

// Returns the process-wide driver. Args: its library, which only the first call selects; "" for the
// system's. Throws Error(kInvalidArgument) if there is no usable driver, naming the missing
// function or library.
const Driver& Load(const std::string& library = "");

// Conversions between device addresses and pointers.
inline Address AddressOf(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }
template <typename T>
T* PointerTo(Address address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// Throws Error(kInternal) with the driver's name for the error if the call failed.
void Check(Result result, const char* function);

}  // namespace tfdist::cuda

namespace tfdist {

// The numbers of threads and blocks that share a kernel's work.

constexpr unsigned kKernelThreads = 512;
// For kernels that wait for no other rank: from 256 blocks on, a kernel on an H100 moves memory
// about as fast as a memory copy.
constexpr uint64_t kMaxBlocksAlone = 512;

// The number of blocks for a number of vectors; the same on all ranks, regardless of their GPUs.
inline unsigned BlocksFor(uint64_t vectors, uint64_t max_blocks) {
  const uint64_t wanted = (vectors + kKernelThreads - 1) / kKernelThreads;
  return static_cast<unsigned>(std::clamp<uint64_t>(wanted, 1, max_blocks));
}

// A GPU and its resources: memory, streams, events, kernels. Each frees its own allocations.
class Gpu {
 public:
  // Args: its number among the GPUs visible to this process. Uses the same context as TensorFlow.
  explicit Gpu(int number);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  // Makes this thread's driver calls address this GPU.
  void Use() const;
  // Variant for destructors, which cannot handle an error.
  void UseIfPossible() const noexcept;
  const std::string& name() const { return name_; }
  // The architecture that its kernels are compiled for, such as "sm_90".
  const std::string& architecture() const { return architecture_; }
  // Unique among all GPUs.
  const cuda::Uuid& uuid() const { return uuid_; }
  // Whether the GPU's streams can wait for words in memory.
  bool has_stream_waits() const { return has_stream_waits_; }
  // Lets work on this GPU access the memory of another GPU of this process. Throws Error if it
  // cannot.
  void ReachInto(int number) const;
  // Its location in the host; all partitions of a GPU share one location.
  const std::string& place() const { return place_; }

 private:
  cuda::Device device_ = 0;
  cuda::Context* context_ = nullptr;
  std::string name_;
  std::string architecture_;
  std::string place_;
  cuda::Uuid uuid_{};
  bool has_stream_waits_ = false;
};

// Returns the error for insufficient GPU memory. Args: the purpose of the bytes, the setting that
// reduces them, and the driver's error.
Error NoRoom(const Gpu& gpu, size_t bytes, const std::string& purpose, const std::string& setting,
             const Error& error);

// Zero-filled memory on the GPU.
class DeviceMemory {
 public:
  DeviceMemory(const Gpu& gpu, size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  cuda::Address address() const { return address_; }
  // Returns a handle that lets another process of the host open the memory.
  cuda::IpcHandle Share() const;

 private:
  const Gpu& gpu_;
  cuda::Address address_ = 0;
};

// Memory of another process on a GPU of this host.
class PeerMemory {
 public:
  PeerMemory(const Gpu& gpu, const cuda::IpcHandle& handle);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  cuda::Address address() const { return address_; }

 private:
  const Gpu& gpu_;
  cuda::Address address_ = 0;
};

// Zero-filled host memory that the GPU can access.
class MappedMemory {
 public:
  MappedMemory(const Gpu& gpu, size_t bytes);
  ~MappedMemory();
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  void* data() const { return data_; }
  cuda::Address address() const { return address_; }  // as the GPU sees it

 private:
  const Gpu& gpu_;
  void* data_ = nullptr;
  cuda::Address address_ = 0;
};

// Makes existing host memory accessible to a GPU.
class RegisteredMemory {
 public:
  RegisteredMemory(const Gpu& gpu, void* data, size_t bytes);
  ~RegisteredMemory();
  RegisteredMemory(const RegisteredMemory&) = delete;
  RegisteredMemory& operator=(const RegisteredMemory&) = delete;

  cuda::Address address() const { return address_; }  // as the GPU sees it

 private:
  const Gpu& gpu_;
  void* registered_ = nullptr;  // null if another object registered it
  cuda::Address address_ = 0;
};

// Runs its work in order, concurrently with other streams and with higher priority if the GPU
// supports it.
class DeviceStream {
 public:
  explicit DeviceStream(const Gpu& gpu);
  ~DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  cuda::Stream* get() const { return stream_; }
  // Copies to, from or within a GPU. Only copies of `MappedMemory` on the host run concurrently
  // with other work.
  void Copy(cuda::Address to, cuda::Address from, size_t bytes) const;
  // Waits for all queued work.
  void Synchronize() const;

 private:
  const Gpu& gpu_;
  cuda::Stream* stream_ = nullptr;
};

// Whether an event has passed; the thread must use its GPU.
bool EventHasPassed(cuda::Event* event);

// A point in a stream.
class DeviceEvent {
 public:
  explicit DeviceEvent(const Gpu& gpu);
  ~DeviceEvent();
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;

  void Record(cuda::Stream* stream);
  // Makes later work of the stream run after this point.
  void HoldBack(cuda::Stream* stream) const;
  bool HasPassed() const;
  cuda::Event* get() const { return event_; }

 private:
  const Gpu& gpu_;
  cuda::Event* event_ = nullptr;
};

// Compiled kernels, all loaded at once: loading a kernel while others wait for it would deadlock.
class KernelModule {
 public:
  // Args: a binary for the GPU's architecture, and the names of its kernels.
  KernelModule(const Gpu& gpu, const void* binary, const char* const* names, size_t count);
  ~KernelModule();
  KernelModule(const KernelModule&) = delete;
  KernelModule& operator=(const KernelModule&) = delete;

  // Launches a kernel in a stream, with the arguments that it declares.
  template <typename... Arguments>
  void Launch(const std::string& name, unsigned blocks, unsigned threads, cuda::Stream* stream,
              Arguments... arguments) const {
    void* all[] = {&arguments...};
    LaunchWith(name, blocks, threads, stream, all);
  }

 private:
  void LaunchWith(const std::string& name, unsigned blocks, unsigned threads, cuda::Stream* stream,
                  void** arguments) const;

  const Gpu& gpu_;
  cuda::Module* module_ = nullptr;
  std::unordered_map<std::string, cuda::Function*> functions_;
};

// Memory kept between operations, which grows on demand.
//
// Args: Memory: DeviceMemory or MappedMemory.
template <typename Memory>
class Growing {
 public:
  // At least `bytes` uninitialized bytes, valid until the next call.
  const Memory& Take(const Gpu& gpu, size_t bytes) {
    if (!memory_ || bytes > bytes_) {
      memory_ = nullptr;
      memory_ = std::make_unique<Memory>(gpu, std::max<size_t>(bytes, 1));
      bytes_ = bytes;
    }
    return *memory_;
  }

 private:
  std::unique_ptr<Memory> memory_;
  size_t bytes_ = 0;
};

}  // namespace tfdist
