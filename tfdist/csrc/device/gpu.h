// The CUDA driver, which is loaded at run time, and the resources of a GPU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include "error.h"

// The CUDA driver functions that the core uses. They are loaded at run time, so the core can be
// compiled without CUDA, and each machine uses its own driver.

namespace tfdist::cuda {

struct Context;
struct Stream;
struct Event;
struct Module;
struct Function;
using Result = int;                  // CUresult
using Device = int;                  // CUdevice
using Address = unsigned long long;  // CUdeviceptr

// CUipcMemHandle: a handle with which another process of the same host can open GPU memory that
// this process has allocated.
struct IpcHandle {
  char bytes[64];
};

// Constants with values that are the same in CUDA 11 to 13.
constexpr Result kSuccess = 0;
constexpr Result kNotReady = 600;             // CUDA_ERROR_NOT_READY
constexpr Result kPeerAccessIsEnabled = 704;  // CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
constexpr Result kMemoryIsRegistered = 712;   // CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
constexpr unsigned kNonBlocking = 1;          // CU_STREAM_NON_BLOCKING
constexpr unsigned kNoTiming = 2;             // CU_EVENT_DISABLE_TIMING
// CU_MEMHOSTALLOC_PORTABLE and CU_MEMHOSTALLOC_DEVICEMAP. The corresponding flags of
// cuMemHostRegister have the same values.
constexpr unsigned kPortable = 1, kMapped = 2;
constexpr unsigned kLazyPeerAccess = 1;  // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
constexpr int kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
constexpr int kStreamWaits = 122;        // CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
// CU_STREAM_WAIT_VALUE_GEQ: the stream waits until `word - value`, as a signed number of 64 bits,
// is not negative.
constexpr unsigned kReached = 0;
constexpr int kOldestDriver = 12000;  // in the form that cuDriverGetVersion returns

// CUuuid: identifies a GPU across processes.
struct Uuid {
  char bytes[16];
};

// Each function is listed as F(name, parameters). All functions return a Result.
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
// Functions that not all drivers have. If the driver lacks a function, its pointer in `Driver` is
// null.
#define TFDIST_CUDA_IF_PRESENT(F) F(cuStreamWaitValue64_v2, (Stream*, Address, uint64_t, unsigned))

struct Driver {
#define TFDIST_MEMBER(name, arguments) Result(*name) arguments = nullptr;
  TFDIST_CUDA(TFDIST_MEMBER)
  TFDIST_CUDA_IF_PRESENT(TFDIST_MEMBER)
#undef TFDIST_MEMBER
  int version = 0;  // such as 12040
};

// Returns the driver of this process. Throws Error(kInvalidArgument) if there is no usable driver.
// The message names the missing library or function, or the required version.
// Args: library: the path of the driver's library, or "" for the system's library. Only the first
// call loads a library; later calls ignore this argument.
const Driver& Load(const std::string& library = "");

// Convert between device addresses and pointers.
inline Address AddressOf(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }
template <typename T>
T* PointerTo(Address address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// Throws Error(kInternal) if a call of a driver function has failed. The message contains the
// driver's description of the error.
// Args: function: the name of the function.
void Check(Result result, const char* function);

}  // namespace tfdist::cuda

namespace tfdist {

// The number of threads in a block of a kernel, and the number of blocks among which the kernel's
// work is divided.

constexpr unsigned kKernelThreads = 512;
// The maximum number of blocks in a kernel that does not wait for other ranks. On an H100, a kernel
// with 256 blocks or more moves memory about as fast as a memory copy does.
constexpr uint64_t kMaxBlocksAlone = 512;

// Returns the number of blocks for a kernel that processes `vectors` vectors. The number does not
// depend on the GPU, because blocks of different ranks may wait for each other, so all ranks must
// launch the same number of blocks.
inline unsigned BlocksFor(uint64_t vectors, uint64_t max_blocks) {
  const uint64_t wanted = (vectors + kKernelThreads - 1) / kKernelThreads;
  return static_cast<unsigned>(std::clamp<uint64_t>(wanted, 1, max_blocks));
}

// A GPU. The classes below represent memory, streams, events and kernels on a GPU. Their
// destructors free what the constructors have allocated.
class Gpu {
 public:
  // Uses the GPU's primary context, as TensorFlow does.
  // Args: number: the index of the GPU among the GPUs visible to this process.
  explicit Gpu(int number);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  // Makes this GPU the current GPU of the calling thread. Later driver calls of this thread use it.
  void Use() const;
  // Like `Use`, but ignores errors. This is for destructors, which must not throw.
  void UseIfPossible() const noexcept;
  const std::string& name() const { return name_; }
  // Returns the architecture for which the kernels must be compiled, such as "sm_90".
  const std::string& architecture() const { return architecture_; }
  // Returns an identifier that is unique among all GPUs.
  const cuda::Uuid& uuid() const { return uuid_; }
  // Returns whether a stream of this GPU can wait until a word in memory reaches a value.
  bool has_stream_waits() const { return has_stream_waits_; }
  // Allows this GPU to access the memory of another GPU of this process. Throws Error if this is
  // impossible.
  // Args: number: the index of the other GPU among the GPUs visible to this process.
  void ReachInto(int number) const;
  // Returns the PCI bus ID of the GPU. All partitions of a GPU have the same ID.
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

// Returns the error to throw if a GPU does not have enough memory.
// Args: bytes: the number of requested bytes; purpose: what the memory is for; setting: the setting
// that the user can lower so that less memory is requested; error: the error of the driver.
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
  // Returns a handle with which another process of the same host can open this memory.
  cuda::IpcHandle Share() const;

 private:
  const Gpu& gpu_;
  cuda::Address address_ = 0;
};

// Memory on a GPU of this host that another process has allocated and shared with this process.
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
  cuda::Address address() const { return address_; }  // the address that the GPU uses

 private:
  const Gpu& gpu_;
  void* data_ = nullptr;
  cuda::Address address_ = 0;
};

// Existing host memory that this class makes accessible to a GPU.
class RegisteredMemory {
 public:
  RegisteredMemory(const Gpu& gpu, void* data, size_t bytes);
  ~RegisteredMemory();
  RegisteredMemory(const RegisteredMemory&) = delete;
  RegisteredMemory& operator=(const RegisteredMemory&) = delete;

  cuda::Address address() const { return address_; }  // the address that the GPU uses

 private:
  const Gpu& gpu_;
  void* registered_ = nullptr;  // null if another object registered the memory first
  cuda::Address address_ = 0;
};

// A stream of a GPU. Its work runs in order, concurrently with the work of other streams. If the
// GPU supports priorities, this stream has the highest priority.
class DeviceStream {
 public:
  explicit DeviceStream(const Gpu& gpu);
  ~DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  cuda::Stream* get() const { return stream_; }
  // Queues a copy to a GPU, from a GPU, or within a GPU. If the copy reads or writes host memory,
  // this memory should be a `MappedMemory`. Otherwise the copy does not run concurrently with other
  // work.
  void Copy(cuda::Address to, cuda::Address from, size_t bytes) const;
  // Waits until all queued work has finished.
  void Synchronize() const;

 private:
  const Gpu& gpu_;
  cuda::Stream* stream_ = nullptr;
};

// Returns whether an event has passed: whether the GPU has finished all work before this event. The
// calling thread must already use the GPU of the event (see `Gpu::Use`).
bool EventHasPassed(cuda::Event* event);

// A point in a stream. The event passes when the GPU has finished all work before this point.
class DeviceEvent {
 public:
  explicit DeviceEvent(const Gpu& gpu);
  ~DeviceEvent();
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;

  void Record(cuda::Stream* stream);
  // Makes `stream` wait for this event. All work that is queued in `stream` after this call runs
  // only after the event has passed.
  void HoldBack(cuda::Stream* stream) const;
  bool HasPassed() const;
  cuda::Event* get() const { return event_; }

 private:
  const Gpu& gpu_;
  cuda::Event* event_ = nullptr;
};

// The compiled kernels of a GPU. The constructor loads all of them. If a kernel were loaded later,
// there could be a deadlock: the driver may load it only when no kernels are running, but the
// running kernels may wait for the kernel that is being loaded.
class KernelModule {
 public:
  // Args: binary: the compiled code, for the architecture of the GPU; names: the names of the
  // `count` kernels in this code.
  KernelModule(const Gpu& gpu, const void* binary, const char* const* names, size_t count);
  ~KernelModule();
  KernelModule(const KernelModule&) = delete;
  KernelModule& operator=(const KernelModule&) = delete;

  // Launches a kernel in a stream. The arguments must have exactly the types of the kernel's
  // parameters.
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

// Memory that is reused by one operation after another, and replaced with larger memory if an
// operation needs more.
//
// Args: Memory: DeviceMemory or MappedMemory.
template <typename Memory>
class Growing {
 public:
  // Returns memory of at least `bytes` bytes. Its contents are undefined. The memory is valid until
  // the next call, which may replace it.
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
