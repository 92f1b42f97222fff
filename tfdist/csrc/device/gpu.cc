#include "device/gpu.h"

#include <dlfcn.h>
#include <algorithm>
#include <cstring>
#include <iterator>

#include "error.h"

namespace tfdist::cuda {
namespace {

constexpr char kSystems[] = "libcuda.so.1";

// Errors after which this process can no longer use its GPUs: CUDA_ERROR_ECC_UNCORRECTABLE,
// CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_LAUNCH_TIMEOUT, CUDA_ERROR_ASSERT, and all errors from
// CUDA_ERROR_HARDWARE_STACK_ERROR to CUDA_ERROR_LAUNCH_FAILED.
constexpr Result kSticky[] = {214, 700, 702, 710, 714, 715, 716, 717, 718, 719};

std::string VersionOf(int number) {
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

// Returns whether this process must be restarted after an error, because it can no longer use its
// GPUs.
bool IsSticky(Result result) {
  return std::find(std::begin(kSticky), std::end(kSticky), result) != std::end(kSticky);
}

[[noreturn]] void Refuse(const std::string& why) {
  throw Error(Code::kInvalidArgument, "The GPUs cannot be used by the native collectives: " + why);
}

Driver Resolve(const std::string& library) {
  const std::string name = library.empty() ? kSystems : library;
  void* const opened = dlopen(name.c_str(), RTLD_NOW);
  if (!opened) {
    Refuse("there is no driver (" + std::string(dlerror()) +
           "). Install NVIDIA's driver, or start the container with its GPUs.");
  }
  const std::string newer = " Install a driver for CUDA " + VersionOf(kOldestDriver) + " or newer.";
  Driver driver;
#define TFDIST_RESOLVE(function, arguments)                                          \
  driver.function = reinterpret_cast<Result(*) arguments>(dlsym(opened, #function)); \
  if (!driver.function) Refuse("the driver " + name + " lacks " #function "." + newer);
  TFDIST_CUDA(TFDIST_RESOLVE)
#undef TFDIST_RESOLVE
#define TFDIST_FIND(function, arguments) \
  driver.function = reinterpret_cast<Result(*) arguments>(dlsym(opened, #function));
  TFDIST_CUDA_IF_PRESENT(TFDIST_FIND)
#undef TFDIST_FIND
  const Result result = driver.cuInit(0);
  if (result != kSuccess) {
    const char* text = nullptr;
    driver.cuGetErrorString(result, &text);
    Refuse("the driver " + name + " does not start (" + (text ? text : "unknown error") +
           "). nvidia-smi may say why.");
  }
  driver.cuDriverGetVersion(&driver.version);
  if (driver.version < kOldestDriver) {
    Refuse("the driver " + name + " is for CUDA " + VersionOf(driver.version) + "." + newer);
  }
  return driver;
}

}  // namespace

const Driver& Load(const std::string& library) {
  static const Driver driver = Resolve(library);
  return driver;
}

void Check(Result result, const char* function) {
  if (result == kSuccess) return;
  const Driver& driver = Load();
  const char *name = nullptr, *text = nullptr;
  driver.cuGetErrorName(result, &name);
  driver.cuGetErrorString(result, &text);
  throw Error(Code::kInternal, std::string(function) + " of the GPU's driver has failed: " +
                                   (text ? text : "unknown error") + " (" +
                                   (name ? name : std::to_string(result).c_str()) + ")." +
                                   (IsSticky(result) ? " Restart the process." : ""));
}

}  // namespace tfdist::cuda

namespace tfdist {

using cuda::Load;

#define TFDIST_CALL(function, ...) cuda::Check(Load().function(__VA_ARGS__), #function)

Gpu::Gpu(int number) {
  int count = 0;
  TFDIST_CALL(cuDeviceGetCount, &count);
  if (number < 0 || number >= count) {
    throw Error(Code::kInvalidArgument,
                "This process sees " + std::to_string(count) +
                    " GPUs, numbered from 0. Received: " + std::to_string(number) +
                    ". CUDA_VISIBLE_DEVICES selects the visible GPUs.");
  }
  TFDIST_CALL(cuDeviceGet, &device_, number);
  char name[128] = {};
  TFDIST_CALL(cuDeviceGetName, name, sizeof(name) - 1, device_);
  name_ = name;
  TFDIST_CALL(cuDeviceGetUuid_v2, &uuid_, device_);
  char place[32] = {};
  TFDIST_CALL(cuDeviceGetPCIBusId, place, sizeof(place) - 1, device_);
  place_ = place;
  int major = 0, minor = 0;
  TFDIST_CALL(cuDeviceGetAttribute, &major, cuda::kMajor, device_);
  TFDIST_CALL(cuDeviceGetAttribute, &minor, cuda::kMinor, device_);
  architecture_ = "sm_" + std::to_string(major) + std::to_string(minor);
  int can_wait = 0;
  TFDIST_CALL(cuDeviceGetAttribute, &can_wait, cuda::kStreamWaits, device_);
  has_stream_waits_ = can_wait && Load().cuStreamWaitValue64_v2;
  TFDIST_CALL(cuDevicePrimaryCtxRetain, &context_, device_);
}

Gpu::~Gpu() { Load().cuDevicePrimaryCtxRelease_v2(device_); }

void Gpu::Use() const { TFDIST_CALL(cuCtxSetCurrent, context_); }

void Gpu::UseIfPossible() const noexcept { Load().cuCtxSetCurrent(context_); }

void Gpu::ReachInto(int number) const {
  cuda::Device other = 0;
  TFDIST_CALL(cuDeviceGet, &other, number);
  int can = 0;
  TFDIST_CALL(cuDeviceCanAccessPeer, &can, device_, other);
  if (!can) {
    throw Error(Code::kUnavailable, "its GPU " + std::to_string(number) +
                                        " cannot be accessed by " + name_ + " at " + place_);
  }
  cuda::Context* reached = nullptr;
  TFDIST_CALL(cuDevicePrimaryCtxRetain, &reached, other);
  Use();
  const cuda::Result result = Load().cuCtxEnablePeerAccess(reached, 0);
  // The context stays alive, because a `Gpu` object of the communicator still retains it.
  Load().cuDevicePrimaryCtxRelease_v2(other);
  if (result != cuda::kPeerAccessIsEnabled) cuda::Check(result, "cuCtxEnablePeerAccess");
}

Error NoRoom(const Gpu& gpu, size_t bytes, const std::string& purpose, const std::string& setting,
             const Error& error) {
  return Error(error.code(), std::to_string(bytes) + " bytes for " + purpose +
                                 " cannot be allocated on " + gpu.name() + " at " + gpu.place() +
                                 "; lower " + setting +
                                 ", or set TF_FORCE_GPU_ALLOW_GROWTH=true: " + error.what());
}

DeviceMemory::DeviceMemory(const Gpu& gpu, size_t bytes) : gpu_(gpu) {
  gpu_.Use();
  const size_t words = (bytes + 3) / 4;
  TFDIST_CALL(cuMemAlloc_v2, &address_, words * 4);
  try {
    TFDIST_CALL(cuMemsetD32Async, address_, 0, words, nullptr);
    TFDIST_CALL(cuStreamSynchronize, nullptr);
  } catch (...) {
    Load().cuMemFree_v2(address_);
    throw;
  }
}

DeviceMemory::~DeviceMemory() {
  gpu_.UseIfPossible();
  Load().cuMemFree_v2(address_);
}

cuda::IpcHandle DeviceMemory::Share() const {
  gpu_.Use();
  cuda::IpcHandle handle;
  TFDIST_CALL(cuIpcGetMemHandle, &handle, address_);
  return handle;
}

PeerMemory::PeerMemory(const Gpu& gpu, const cuda::IpcHandle& handle) : gpu_(gpu) {
  gpu_.Use();
  TFDIST_CALL(cuIpcOpenMemHandle_v2, &address_, handle, cuda::kLazyPeerAccess);
}

PeerMemory::~PeerMemory() {
  gpu_.UseIfPossible();
  Load().cuIpcCloseMemHandle(address_);
}

MappedMemory::MappedMemory(const Gpu& gpu, size_t bytes) : gpu_(gpu) {
  gpu_.Use();
  TFDIST_CALL(cuMemHostAlloc, &data_, bytes, cuda::kPortable | cuda::kMapped);
  std::memset(data_, 0, bytes);
  const cuda::Result result = Load().cuMemHostGetDevicePointer_v2(&address_, data_, 0);
  if (result != cuda::kSuccess) Load().cuMemFreeHost(data_);
  cuda::Check(result, "cuMemHostGetDevicePointer_v2");
}

MappedMemory::~MappedMemory() {
  gpu_.UseIfPossible();
  Load().cuMemFreeHost(data_);
}

RegisteredMemory::RegisteredMemory(const Gpu& gpu, void* data, size_t bytes) : gpu_(gpu) {
  gpu_.Use();
  const cuda::Result result =
      Load().cuMemHostRegister_v2(data, bytes, cuda::kPortable | cuda::kMapped);
  // If another GPU of this process has already registered this memory, this registration fails.
  // This GPU can then use the existing registration.
  if (result != cuda::kMemoryIsRegistered) {
    cuda::Check(result, "cuMemHostRegister_v2");
    registered_ = data;
  }
  const cuda::Result found = Load().cuMemHostGetDevicePointer_v2(&address_, data, 0);
  if (found != cuda::kSuccess && registered_) Load().cuMemHostUnregister(registered_);
  cuda::Check(found, "cuMemHostGetDevicePointer_v2");
}

RegisteredMemory::~RegisteredMemory() {
  if (!registered_) return;
  gpu_.UseIfPossible();
  Load().cuMemHostUnregister(registered_);
}

DeviceStream::DeviceStream(const Gpu& gpu) : gpu_(gpu) {
  gpu_.Use();
  int least = 0, greatest = 0;
  TFDIST_CALL(cuCtxGetStreamPriorityRange, &least, &greatest);
  TFDIST_CALL(cuStreamCreateWithPriority, &stream_, cuda::kNonBlocking, greatest);
}

DeviceStream::~DeviceStream() {
  gpu_.UseIfPossible();
  Load().cuStreamDestroy_v2(stream_);
}

void DeviceStream::Copy(cuda::Address to, cuda::Address from, size_t bytes) const {
  if (bytes == 0) return;
  gpu_.Use();
  TFDIST_CALL(cuMemcpyAsync, to, from, bytes, stream_);
}

void DeviceStream::Synchronize() const {
  gpu_.Use();
  TFDIST_CALL(cuStreamSynchronize, stream_);
}

DeviceEvent::DeviceEvent(const Gpu& gpu) : gpu_(gpu) {
  gpu_.Use();
  TFDIST_CALL(cuEventCreate, &event_, cuda::kNoTiming);
}

DeviceEvent::~DeviceEvent() {
  gpu_.UseIfPossible();
  Load().cuEventDestroy_v2(event_);
}

void DeviceEvent::Record(cuda::Stream* stream) {
  gpu_.Use();
  TFDIST_CALL(cuEventRecord, event_, stream);
}

void DeviceEvent::HoldBack(cuda::Stream* stream) const {
  gpu_.Use();
  TFDIST_CALL(cuStreamWaitEvent, stream, event_, 0);
}

bool EventHasPassed(cuda::Event* event) {
  const cuda::Result result = Load().cuEventQuery(event);
  if (result == cuda::kNotReady) return false;
  cuda::Check(result, "cuEventQuery");
  return true;
}

bool DeviceEvent::HasPassed() const {
  gpu_.Use();
  return EventHasPassed(event_);
}

KernelModule::KernelModule(const Gpu& gpu, const void* binary, const char* const* names,
                           size_t count)
    : gpu_(gpu) {
  gpu_.Use();
  TFDIST_CALL(cuModuleLoadData, &module_, binary);
  try {
    for (size_t i = 0; i < count; ++i) {
      TFDIST_CALL(cuModuleGetFunction, &functions_[names[i]], module_, names[i]);
    }
  } catch (...) {
    Load().cuModuleUnload(module_);
    throw;
  }
}

KernelModule::~KernelModule() {
  gpu_.UseIfPossible();
  Load().cuModuleUnload(module_);
}

void KernelModule::LaunchWith(const std::string& name, unsigned blocks, unsigned threads,
                              cuda::Stream* stream, void** arguments) const {
  gpu_.Use();
  TFDIST_CALL(cuLaunchKernel, functions_.at(name), blocks, 1, 1, threads, 1, 1, 0, stream,
              arguments, nullptr);
}

}  // namespace tfdist
