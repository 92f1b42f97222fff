// The CUDA driver, which is loaded at run time, and the resources of a GPU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include "error.h"

// The CUDA driver functions that the core uses. They are loaded at run time. The compilation
// therefore does not need CUDA, and each machine uses its own driver.

namespace tfdist::cuda {

struct Context;
struct Stream;
struct Event;
struct Module;
struct Function;
using Result = int;                  // CUresult
using Device = int;                  // CUdevice
using Address = unsigned long long;  // CUdeviceptr

// CUipcMemHandle: lets another process of the host open an allocation of this process.
struct IpcHandle {
  char bytes[64];
};

// Constants that are the same in CUDA 11 to 13.
constexpr Result kSuccess = 0;
constexpr Result kNotReady = 600;             // CUDA_ERROR_NOT_READY
constexpr Result kPeerAccessIsEnabled = 704;  // CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
constexpr Result kMemoryIsRegistered = 712;   // CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
constexpr unsigned kNonBlocking = 1;          // CU_STREAM_NON_BLOCKING
constexpr unsigned kNoTiming = 2;             // CU_EVENT_DISABLE_TIMING
// CU_MEMHOSTALLOC_PORTABLE and CU_MEMHOSTALLOC_DEVICEMAP. cuMemHostRegister uses the same numbers.
constexpr unsigned kPortable = 1, kMapped = 2;
constexpr unsigned kLazyPeerAccess = 1;  // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
constexpr int kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
constexpr int kStreamWaits = 122;        // CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
constexpr unsigned kReached =
    0;  // CU_STREAM_WAIT_VALUE_GEQ: waits until word - value, as an int64, is not negative
constexpr int kOldestDriver = 12000;  // as returned by cuDriverGetVersion

// CUuuid: identifies a GPU across processes.
struct Uuid {
  char bytes[16];
};

// For each function: its name and parameters. All functions return a Result.
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
// These functions are null if the driver lacks them.
#define TFDIST_CUDA_IF_PRESENT(F) F(cuStreamWaitValue64_v2, (Stream*, Address, uint64_t, unsigned))

struct Driver {
#define TFDIST_MEMBER(name, arguments) Result(*name) arguments = nullptr;
  TFDIST_CUDA(TFDIST_MEMBER)
  TFDIST_CUDA_IF_PRESENT(TFDIST_MEMBER)
#undef TFDIST_MEMBER
  int version = 0;  // such as 12040
};

// Returns the driver of this process. Throws Error(kInvalidArgument) if there is no usable driver.
// The message names the missing function or library.
// Args: library: the path of the driver's library, or "" for the system's library. Only the first
// call uses this argument.
const Driver& Load(const std::string& library = "");

// Conversions between device addresses and pointers.
inline Address AddressOf(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }
template <typename T>
T* PointerTo(Address address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// Throws Error(kInternal) with the driver's name for the error if a call has failed.
void Check(Result result, const char* function);

}  // namespace tfdist::cuda

namespace tfdist {

// The numbers of threads and blocks among which the work of a kernel is divided.

constexpr unsigned kKernelThreads = 512;
// The maximum number of blocks for kernels that do not wait for other ranks. With 256 blocks or
// more, a kernel on an H100 moves memory about as fast as a memory copy.
constexpr uint64_t kMaxBlocksAlone = 512;

// Returns the number of blocks for this number of vectors. It is the same on all ranks, even if
// they have different GPUs.
inline unsigned BlocksFor(uint64_t vectors, uint64_t max_blocks) {
  const uint64_t wanted = (vectors + kKernelThreads - 1) / kKernelThreads;
  return static_cast<unsigned>(std::clamp<uint64_t>(wanted, 1, max_blocks));
}

// A GPU. The classes below are its resources: memory, streams, events and kernels. Each of them
// frees what it has allocated.
class Gpu {
 public:
  // Uses the same context as TensorFlow.
  // Args: number: the index of the GPU among the GPUs visible to this process.
  explicit Gpu(int number);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  // Makes the driver calls of this thread use this GPU.
  void Use() const;
  // Like `Use`, but ignores errors. For destructors, which cannot handle an error.
  void UseIfPossible() const noexcept;
  const std::string& name() const { return name_; }
  // Returns the architecture for which the kernels must be compiled, such as "sm_90".
  const std::string& architecture() const { return architecture_; }
  // Returns an identifier that is unique among all GPUs.
  const cuda::Uuid& uuid() const { return uuid_; }
  // Returns whether the streams of this GPU can wait for words in memory.
  bool has_stream_waits() const { return has_stream_waits_; }
  // Allows work on this GPU to access the memory of another GPU of this process. Throws Error if
  // this is impossible.
  void ReachInto(int number) const;
  // Returns the location of the GPU in its host. All partitions of a GPU have the same location.
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

// Returns the error for insufficient memory on a GPU.
// Args: bytes: the size of the requested memory; purpose: the purpose of this memory; setting: the
// setting that reduces this size; error: the error of the driver.
Error NoRoom(const Gpu& gpu, size_t bytes, const std::string& purpose, const std::string& setting,
             const Error& error);

// Memory on a GPU. It is initially filled with zeros.
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

// Memory that another process has allocated on a GPU of this host.
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

// Host memory that a GPU can access. It is initially filled with zeros.
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

// Existing host memory that is made accessible to a GPU.
class RegisteredMemory {
 public:
  RegisteredMemory(const Gpu& gpu, void* data, size_t bytes);
  ~RegisteredMemory();
  RegisteredMemory(const RegisteredMemory&) = delete;
  RegisteredMemory& operator=(const RegisteredMemory&) = delete;

  cuda::Address address() const { return address_; }  // as the GPU sees it

 private:
  const Gpu& gpu_;
  void* registered_ = nullptr;  // null if another object has registered the memory
  cuda::Address address_ = 0;
};

// A stream of a GPU. It runs its work in order, concurrently with other streams. If the GPU
// supports priorities, it has a higher priority than other streams.
class DeviceStream {
 public:
  explicit DeviceStream(const Gpu& gpu);
  ~DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  cuda::Stream* get() const { return stream_; }
  // Queues a copy to a GPU, from a GPU, or within a GPU. A copy to or from host memory runs
  // concurrently with other work only if this memory is a `MappedMemory`.
  void Copy(cuda::Address to, cuda::Address from, size_t bytes) const;
  // Waits until all queued work has finished.
  void Synchronize() const;

 private:
  const Gpu& gpu_;
  cuda::Stream* stream_ = nullptr;
};

// Returns whether an event has passed. The thread must already use the GPU of this event.
bool EventHasPassed(cuda::Event* event);

// A point in a stream.
class DeviceEvent {
 public:
  explicit DeviceEvent(const Gpu& gpu);
  ~DeviceEvent();
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;

  void Record(cuda::Stream* stream);
  // Makes all work that is queued in `stream` after this call wait for this point.
  void HoldBack(cuda::Stream* stream) const;
  bool HasPassed() const;
  cuda::Event* get() const { return event_; }

 private:
  const Gpu& gpu_;
  cuda::Event* event_ = nullptr;
};

// Compiled kernels. All of them are loaded at the same time, in advance: loading a kernel while
// other kernels wait for it would cause a deadlock.
class KernelModule {
 public:
  // Args: binary: code for the architecture of the GPU; names: the names of the kernels in this
  // code.
  KernelModule(const Gpu& gpu, const void* binary, const char* const* names, size_t count);
  ~KernelModule();
  KernelModule(const KernelModule&) = delete;
  KernelModule& operator=(const KernelModule&) = delete;

  // Launches a kernel in a stream. The arguments must have the types that the kernel declares.
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

// Memory that is kept between operations, and that grows on demand.
//
// Args: Memory: DeviceMemory or MappedMemory.
template <typename Memory>
class Growing {
 public:
  // Returns at least `bytes` bytes of uninitialized memory. It is valid until the next call.
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
