// The CUDA driver, loaded at run time: GPUs, memory and modules.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include "error.h"

// The few functions of CUDA's driver that are used, found when the process runs: so nothing of CUDA
// is needed to compile, and what runs is the driver of the machine.

namespace tfdist::cuda {

struct Context;
struct Stream;
struct Event;
struct Module;
struct Function;
using Result = int;                  // CUresult
using Device = int;                  // CUdevice
using Address = unsigned long long;  // CUdeviceptr

// CUipcMemHandle: tells another process of the host of an allocation.
struct IpcHandle {
  char bytes[64];
};

// Numbers of CUDA 11 to 13.
constexpr Result kSuccess = 0;
constexpr Result kNotReady = 600;             // CUDA_ERROR_NOT_READY
constexpr Result kPeerAccessIsEnabled = 704;  // CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
constexpr Result kMemoryIsRegistered = 712;   // CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
constexpr unsigned kNonBlocking = 1;          // CU_STREAM_NON_BLOCKING
constexpr unsigned kNoTiming = 2;             // CU_EVENT_DISABLE_TIMING
constexpr unsigned kPortable = 1,
                   kMapped = 2;          // CU_MEMHOSTALLOC_PORTABLE, _DEVICEMAP; also to register
constexpr unsigned kLazyPeerAccess = 1;  // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
constexpr int kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
constexpr int kStreamWaits = 122;        // CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
constexpr unsigned kReached =
    0;  // CU_STREAM_WAIT_VALUE_GEQ: how two's complements of int64 compare
constexpr int kOldestDriver = 12000;  // as cuDriverGetVersion tells it

// CUuuid: tells GPUs apart, also between processes.
struct Uuid {
  char bytes[16];
};

// Name, what it takes. All return a Result.
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
// Throws Error(kInvalidArgument) if there is none, or none that is usable, and says what is
// missing.
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

namespace tfdist {

// How many threads and blocks share a kernel's work.

constexpr unsigned kKernelThreads = 512;
// Of kernels that wait for nobody: from 256 blocks on, an H100 moves memory about as fast as it
// copies.
constexpr uint64_t kMostBlocksAlone = 512;

// The same on all ranks, whatever GPU they have.
inline unsigned BlocksFor(uint64_t vectors, uint64_t most) {
  const uint64_t wanted = (vectors + kKernelThreads - 1) / kKernelThreads;
  return static_cast<unsigned>(std::clamp<uint64_t>(wanted, 1, most));
}

// A GPU, and what belongs to it: memory, streams, events, kernels. Each frees what it has made.
class Gpu {
 public:
  // Args: its number among those that this process sees. The context is the one that TensorFlow
  // uses.
  explicit Gpu(int number);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  // Has this thread's calls of the driver go to this GPU.
  void Use() const;
  // The same for what frees, which can do nothing about an error.
  void UseIfPossible() const noexcept;
  const std::string& name() const { return name_; }
  // What its kernels are compiled for, such as "sm_90".
  const std::string& architecture() const { return architecture_; }
  // Its own among all GPUs.
  const cuda::Uuid& uuid() const { return uuid_; }
  // Whether its streams can wait for words in memory.
  bool has_stream_waits() const { return has_stream_waits_; }
  // Lets what runs on this GPU use the memory of another one of this process. Throws Error where it
  // cannot.
  void ReachInto(int number) const;
  // Where it is in its host; parts of a GPU have one place.
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

// What is thrown where a GPU has too little memory left.
// Args: what the bytes are for, and the setting that makes do with fewer; what the driver has said.
Error NoRoom(const Gpu& gpu, size_t bytes, const std::string& purpose, const std::string& setting,
             const Error& error);

// On the GPU; all zero.
class DeviceMemory {
 public:
  DeviceMemory(const Gpu& gpu, size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  cuda::Address address() const { return address_; }
  // What another process of the host opens it by.
  cuda::IpcHandle Share() const;

 private:
  const Gpu& gpu_;
  cuda::Address address_ = 0;
};

// That of another process, of a GPU of this host.
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

// In the host's memory, for both; all zero.
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

// In memory of the host that somebody else has, for a GPU, too.
class RegisteredMemory {
 public:
  RegisteredMemory(const Gpu& gpu, void* data, size_t bytes);
  ~RegisteredMemory();
  RegisteredMemory(const RegisteredMemory&) = delete;
  RegisteredMemory& operator=(const RegisteredMemory&) = delete;

  cuda::Address address() const { return address_; }  // as the GPU sees it

 private:
  const Gpu& gpu_;
  void* registered_ = nullptr;  // by this
  cuda::Address address_ = 0;
};

// What it is given runs in order, beside what other streams run, and before them where a GPU can.
class DeviceStream {
 public:
  explicit DeviceStream(const Gpu& gpu);
  ~DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  cuda::Stream* get() const { return stream_; }
  // Copies to or from a GPU, or within one; the host's memory has to be `MappedMemory` to come or
  // go beside other work.
  void Copy(cuda::Address to, cuda::Address from, size_t bytes) const;
  // Waits for all that it was given.
  void Synchronize() const;

 private:
  const Gpu& gpu_;
  cuda::Stream* stream_ = nullptr;
};

// Whether a point in a stream has passed; the thread uses its GPU.
bool HasPassed(cuda::Event* event);

// A point in a stream.
class DeviceEvent {
 public:
  explicit DeviceEvent(const Gpu& gpu);
  ~DeviceEvent();
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;

  void Record(cuda::Stream* stream);
  // What the stream is given from now on runs after this point.
  void HoldBack(cuda::Stream* stream) const;
  bool HasPassed() const;
  cuda::Event* get() const { return event_; }

 private:
  const Gpu& gpu_;
  cuda::Event* event_ = nullptr;
};

// Compiled kernels, all of them loaded at once: to load one while others wait for it would wait for
// them.
class KernelModule {
 public:
  // Args: a binary for the GPU's architecture, and the names of its kernels.
  KernelModule(const Gpu& gpu, const void* binary, const char* const* names, size_t count);
  ~KernelModule();
  KernelModule(const KernelModule&) = delete;
  KernelModule& operator=(const KernelModule&) = delete;

  // Runs a kernel in a stream, with arguments as it declares them.
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

// Memory that is kept between operations, and grows with what they need.
//
// Args: Memory: DeviceMemory or MappedMemory.
template <typename Memory>
class Growing {
 public:
  // At least so many bytes, of any content; valid until the next call.
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
