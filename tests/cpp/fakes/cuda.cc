// A CUDA driver for machines without GPUs: streams are threads, memory is host memory, and kernels
// run on the processor. Built as a library that replaces libcuda.so.1.
#include "device/gpu.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "cpp/simulated_gpu.h"  // before the kernels

#include "cpp/fakes/held.h"
#include "cpp/fakes/streams.h"
#include "device/kernels/all.cu"

namespace tfdist::cuda {

struct Context {
  Device device;
};
struct Module {};

// Makes a task from a kernel and copies of its arguments.
struct Function {
  std::function<std::function<void()>(void** arguments, unsigned blocks)> bind;
};

namespace {

constexpr Result kInvalidValue = 1, kOutOfMemory = 2, kNotFound = 500, kIsNotRegistered = 713;
constexpr auto kPause = std::chrono::microseconds(50);
// As many threads as ranks in a barrier, a multiple of a half-warp, regardless of the launch:
// kernels work with any number of such threads.
constexpr uint32_t kThreads = device::kMaxRanks;
static_assert(kThreads % device::kHalfWarp == 0);

std::mutex mutex;  // guards the following members
std::map<std::string, Result> failing;
struct Allocation {
  int descriptor;
  size_t bytes;
  Device device;
};
std::map<Address, Allocation> allocations;
std::map<Address, size_t> opened;
std::set<void*> registered;
std::atomic<int> launched{0}, copied{0};
thread_local Context* current = nullptr;
fakes::Held held;

Result Injected(const char* function) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = failing.find(function);
  return found == failing.end() ? kSuccess : found->second;
}

// FAKE_CUDA_LINKS: failures of a GPU's reads of another GPU's memory, such as "0-1:cut,1-0:wrong";
// "cut": no access; "wrong": a byte changes; "stuck": the read never ends.
bool IsBroken(Device reader, Device owner, const std::string& how) {
  const char* const set = std::getenv("FAKE_CUDA_LINKS");
  const std::string links = std::string(",") + (set ? set : "") + ",";
  const std::string pair = std::to_string(reader) + "-" + std::to_string(owner);
  return links.find("," + pair + ":" + how + ",") != std::string::npos;
}

// Returns the GPU that owns the memory; -1 for the host or another process.
Device OwnerOf(Address address) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto next = allocations.upper_bound(address);
  if (next == allocations.begin()) return -1;
  const auto& [begin, allocation] = *std::prev(next);
  return address < begin + allocation.bytes ? allocation.device : -1;
}

Stream* DefaultStream() {
  static auto* const stream = new Stream();
  return stream;
}
// FAKE_CUDA_ONE_QUEUE: all streams of a GPU run their work in the order of submission, like streams
// of a GPU without enough queues or resources.
std::shared_ptr<Queue> QueueOf(Device device) {
  static auto& all = *new std::map<Device, std::shared_ptr<Queue>>;
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Queue>& queue = all[device];
  if (!queue) queue = std::make_shared<Queue>();
  return queue;
}

Stream* Resolve(Stream* stream) { return stream ? stream : DefaultStream(); }

Address Map(int descriptor, size_t bytes) {
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  return data == MAP_FAILED ? 0 : reinterpret_cast<Address>(data);
}

template <typename... Parameters, size_t... kIndex>
std::tuple<Parameters...> Copied(void** arguments, std::index_sequence<kIndex...>) {
  return {*static_cast<Parameters*>(arguments[kIndex])...};
}

template <typename... Parameters>
Function Bound(void (*kernel)(Parameters...)) {
  return {[kernel](void** arguments, unsigned blocks) -> std::function<void()> {
    const auto copied = Copied<Parameters...>(arguments, std::index_sequence_for<Parameters...>());
    return [kernel, copied, blocks] {
      std::apply([&](const auto&... each) { device::Launch(kernel, blocks, kThreads, each...); },
                 copied);
    };
  }};
}

std::map<std::string, Function> AllFunctions() {
  std::map<std::string, Function> all{{"tfdist_pack", Bound(device::tfdist_pack)},
                                      {"tfdist_barrier", Bound(device::tfdist_barrier)},
                                      {"tfdist_signal", Bound(device::tfdist_signal)},
                                      {"tfdist_unpack", Bound(device::tfdist_unpack)}};
#define TFDIST_ADD(name, T, Op, S)                                       \
  all["tfdist_one_shot_" #name] = Bound(device::tfdist_one_shot_##name); \
  all["tfdist_reduce_" #name] = Bound(device::tfdist_reduce_##name);
  TFDIST_FOR_ALL_REDUCTIONS(TFDIST_ADD)
#undef TFDIST_ADD
  // The kernel of benchmarks/gpu/product.cu, whose result is not used.
  all["benchmark_product"] = {[](void**, unsigned) { return [] {}; }};
#define TFDIST_ADD(name, F)                                          \
  all["tfdist_encode_" #name] = Bound(device::tfdist_encode_##name); \
  all["tfdist_decode_" #name] = Bound(device::tfdist_decode_##name); \
  all["tfdist_sum_" #name] = Bound(device::tfdist_sum_##name);
  TFDIST_FOR_ALL_ENCODINGS(TFDIST_ADD)
#undef TFDIST_ADD
  all["tfdist_sum_votes"] = Bound(device::tfdist_sum_votes);
#define TFDIST_ADD(name) all["tfdist_" #name] = Bound(device::tfdist_##name);
  TFDIST_FOR_SELECT_KERNELS(TFDIST_ADD)
  TFDIST_FOR_SCATTER_KERNELS(TFDIST_ADD)
#undef TFDIST_ADD
  return all;
}

}  // namespace

#define FAKE(function, ...)                \
  extern "C" Result function(__VA_ARGS__); \
  extern "C" Result function(__VA_ARGS__)
#define INJECT(function) \
  if (const Result injected = Injected(#function)) return injected

// Makes a driver function fail from now on; 0 to succeed again.
extern "C" void fake_fail(const char* function, Result result) {
  const std::lock_guard<std::mutex> lock(mutex);
  failing[function] = result;
}

// The resources that have been handed out and not returned.
extern "C" const char* fake_held() { return held.Text(); }

// The numbers of kernels and copies submitted so far.
extern "C" int fake_launches() { return launched; }
extern "C" int fake_copies() { return copied; }

FAKE(cuInit, unsigned) {
  INJECT(cuInit);
  return kSuccess;
}
FAKE(cuDriverGetVersion, int* version) {
  const char* const set = std::getenv("FAKE_CUDA_VERSION");
  *version = set ? std::atoi(set) : 12040;
  return kSuccess;
}
FAKE(cuGetErrorName, Result result, const char** name) {
  *name = result == kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN";
  return kSuccess;
}
FAKE(cuGetErrorString, Result result, const char** text) {
  *text = result == kOutOfMemory ? "out of memory" : "unknown error";
  return kSuccess;
}
// FAKE_CUDA_DEVICES: the number of GPUs visible to a process.
FAKE(cuDeviceGetCount, int* count) {
  const char* const set = std::getenv("FAKE_CUDA_DEVICES");
  *count = set ? std::atoi(set) : 8;
  return kSuccess;
}
FAKE(cuDeviceGet, Device* device, int number) {
  *device = number;
  return kSuccess;
}
// FAKE_CUDA_MODELS: each GPU has a different model.
FAKE(cuDeviceGetName, char* name, int length, Device device) {
  const std::string model = std::getenv("FAKE_CUDA_MODELS") ? " " + std::to_string(device) : "";
  std::snprintf(name, static_cast<size_t>(length), "A GPU of threads%s", model.c_str());
  return kSuccess;
}
// FAKE_CUDA_FIRST: the first GPU visible to this process.
FAKE(cuDeviceGetUuid_v2, Uuid* uuid, Device device) {
  const char* const first = std::getenv("FAKE_CUDA_FIRST");
  std::memset(uuid->bytes, device + 1 + (first ? std::atoi(first) : 0), sizeof(uuid->bytes));
  return kSuccess;
}
// FAKE_CUDA_PARTS: all visible GPUs are partitions of one GPU.
FAKE(cuDeviceGetPCIBusId, char* place, int length, Device device) {
  const char* const first = std::getenv("FAKE_CUDA_FIRST");
  const int number = std::getenv("FAKE_CUDA_PARTS") ? 0 : device + (first ? std::atoi(first) : 0);
  std::snprintf(place, static_cast<size_t>(length), "0000:%02x:00.0", number);
  return kSuccess;
}
// FAKE_CUDA_NO_STREAM_WAITS: streams cannot wait for a word.
FAKE(cuDeviceGetAttribute, int* value, int attribute, Device) {
  *value = attribute == kMajor ? 9 : attribute == kMinor ? 0 : 132;
  if (attribute == kStreamWaits) *value = !std::getenv("FAKE_CUDA_NO_STREAM_WAITS");
  return kSuccess;
}
FAKE(cuDeviceCanAccessPeer, int* can, Device reader, Device owner) {
  *can = !IsBroken(reader, owner, "cut");
  return kSuccess;
}
FAKE(cuDeviceGetP2PAttribute, int* value, int attribute, Device reader, Device owner) {
  constexpr int kPerformanceRank = 1;
  *value = attribute == kPerformanceRank ? 0 : !IsBroken(reader, owner, "cut");
  return kSuccess;
}
FAKE(cuDevicePrimaryCtxRetain, Context** context, Device device) {
  static std::map<Device, Context> all;
  const std::lock_guard<std::mutex> lock(mutex);
  *context = &all.emplace(device, Context{device}).first->second;
  held.Count("contexts", 1);
  return kSuccess;
}
FAKE(cuDevicePrimaryCtxRelease_v2, Device) {
  held.Count("contexts", -1);
  return kSuccess;
}
FAKE(cuCtxSetCurrent, Context* context) {
  INJECT(cuCtxSetCurrent);
  current = context;
  return kSuccess;
}
FAKE(cuCtxEnablePeerAccess, Context* context, unsigned) {
  INJECT(cuCtxEnablePeerAccess);
  static std::set<std::pair<Context*, Context*>> enabled;
  const std::lock_guard<std::mutex> lock(mutex);
  return enabled.insert({current, context}).second ? kSuccess : kPeerAccessIsEnabled;
}
FAKE(cuCtxGetStreamPriorityRange, int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return kSuccess;
}

FAKE(cuMemAlloc_v2, Address* address, size_t bytes) {
  INJECT(cuMemAlloc_v2);
  const int descriptor = memfd_create("fake-gpu", MFD_CLOEXEC);
  if (descriptor < 0 || ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) return kOutOfMemory;
  *address = Map(descriptor, bytes);
  if (!*address) return kOutOfMemory;
  const std::lock_guard<std::mutex> lock(mutex);
  allocations[*address] = {descriptor, bytes, current ? current->device : 0};
  held.Count("memory", 1);
  return kSuccess;
}
FAKE(cuMemFree_v2, Address address) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = allocations.find(address);
  if (found == allocations.end()) return kInvalidValue;
  munmap(reinterpret_cast<void*>(address), found->second.bytes);
  close(found->second.descriptor);
  allocations.erase(found);
  held.Count("memory", -1);
  return kSuccess;
}
FAKE(cuMemHostAlloc, void** data, size_t bytes, unsigned) {
  INJECT(cuMemHostAlloc);
  *data = std::malloc(bytes);
  if (!*data) return kOutOfMemory;
  held.Count("memory of the host", 1);
  return kSuccess;
}
FAKE(cuMemFreeHost, void* data) {
  held.Count("memory of the host", -1);
  std::free(data);
  return kSuccess;
}
FAKE(cuMemHostGetDevicePointer_v2, Address* address, void* data, unsigned) {
  *address = reinterpret_cast<Address>(data);
  return kSuccess;
}
FAKE(cuMemHostRegister_v2, void* data, size_t, unsigned) {
  INJECT(cuMemHostRegister_v2);
  const std::lock_guard<std::mutex> lock(mutex);
  if (!registered.insert(data).second) return kMemoryIsRegistered;
  held.Count("registered memory", 1);
  return kSuccess;
}
FAKE(cuMemHostUnregister, void* data) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!registered.erase(data)) return kIsNotRegistered;
  held.Count("registered memory", -1);
  return kSuccess;
}
FAKE(cuMemsetD32Async, Address to, unsigned value, size_t count, Stream* stream) {
  Resolve(stream)->Enqueue([=] {
    // Writes whole words, which kernels may read meanwhile.
    auto* const words = reinterpret_cast<unsigned*>(to);
    for (size_t i = 0; i < count; ++i) __atomic_store_n(words + i, value, __ATOMIC_RELAXED);
  });
  return kSuccess;
}
// FAKE_CUDA_SLOW_COPIES: the additional time of a copy in µs.
FAKE(cuMemcpyAsync, Address to, Address from, size_t bytes, Stream* stream) {
  ++copied;
  const Device reader = OwnerOf(to), owner = OwnerOf(from);
  const bool stuck = IsBroken(reader, owner, "stuck"), wrong = IsBroken(reader, owner, "wrong");
  const char* const set = std::getenv("FAKE_CUDA_SLOW_COPIES");
  const auto slow = std::chrono::microseconds(set ? std::atoi(set) : 0);
  Resolve(stream)->Enqueue([=] {
    while (stuck) pause();
    if (set) std::this_thread::sleep_for(slow);
    // Copies a whole word, which others may write meanwhile.
    if (bytes == sizeof(uint64_t) && to % bytes == 0 && from % bytes == 0) {
      const uint64_t word =
          __atomic_load_n(reinterpret_cast<const uint64_t*>(from), __ATOMIC_ACQUIRE);
      __atomic_store_n(reinterpret_cast<uint64_t*>(to), word, __ATOMIC_RELEASE);
      return;
    }
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
    if (wrong) reinterpret_cast<char*>(to)[bytes - 1] ^= 1;
  });
  return kSuccess;
}
FAKE(cuLaunchHostFunc, Stream* stream, void (*function)(void*), void* data) {
  Resolve(stream)->Enqueue([=] { function(data); });
  return kSuccess;
}

FAKE(cuStreamCreateWithPriority, Stream** stream, unsigned, int) {
  INJECT(cuStreamCreateWithPriority);
  *stream = std::getenv("FAKE_CUDA_ONE_QUEUE") && current ? new Stream{QueueOf(current->device)}
                                                          : new Stream();
  held.Count("streams", 1);
  return kSuccess;
}
FAKE(cuStreamDestroy_v2, Stream* stream) {
  delete stream;  // its work continues if other streams use the queue
  held.Count("streams", -1);
  return kSuccess;
}
FAKE(cuStreamSynchronize, Stream* stream) {
  const auto mark = std::make_shared<Mark>();
  Resolve(stream)->Enqueue([mark] { mark->Pass(); });
  mark->Wait();
  return kSuccess;
}
FAKE(cuStreamWaitEvent, Stream* stream, Event* event, unsigned) {
  if (const std::shared_ptr<Mark> mark = event->mark) {
    Resolve(stream)->Enqueue([mark] { mark->Wait(); });
  }
  return kSuccess;
}
// The value is reached if the word is not before it, in circular order.
FAKE(cuStreamWaitValue64_v2, Stream* stream, Address address, uint64_t value, unsigned how) {
  INJECT(cuStreamWaitValue64_v2);
  if (how != kReached || address % sizeof(uint64_t) != 0) return kInvalidValue;
  Resolve(stream)->Enqueue([=] {
    const auto* const word = reinterpret_cast<const uint64_t*>(address);
    const auto ahead = [=] {
      return static_cast<int64_t>(__atomic_load_n(word, __ATOMIC_ACQUIRE) - value);
    };
    while (ahead() < 0) std::this_thread::sleep_for(kPause);
  });
  return kSuccess;
}
FAKE(cuEventCreate, Event** event, unsigned) {
  *event = new Event();
  held.Count("events", 1);
  return kSuccess;
}
FAKE(cuEventRecord, Event* event, Stream* stream) {
  const auto mark = event->mark = std::make_shared<Mark>();
  Resolve(stream)->Enqueue([mark] { mark->Pass(); });
  return kSuccess;
}
FAKE(cuEventQuery, Event* event) {
  return !event->mark || event->mark->HasPassed() ? kSuccess : kNotReady;
}
FAKE(cuEventDestroy_v2, Event* event) {
  delete event;
  held.Count("events", -1);
  return kSuccess;
}

FAKE(cuModuleLoadData, Module** module, const void* binary) {
  if (!binary) return kInvalidValue;
  static Module one;
  *module = &one;
  held.Count("modules", 1);
  return kSuccess;
}
FAKE(cuModuleUnload, Module*) {
  held.Count("modules", -1);
  return kSuccess;
}
FAKE(cuModuleGetFunction, Function** function, Module*, const char* name) {
  static std::map<std::string, Function> all = AllFunctions();
  const auto found = all.find(name);
  if (found == all.end()) return kNotFound;
  *function = &found->second;
  return kSuccess;
}
FAKE(cuLaunchKernel, Function* function, unsigned blocks, unsigned, unsigned, unsigned, unsigned,
     unsigned, unsigned, Stream* stream, void** arguments, void**) {
  INJECT(cuLaunchKernel);
  ++launched;
  Resolve(stream)->Enqueue(function->bind(arguments, blocks));
  return kSuccess;
}

// A handle holds a process and its descriptor.
FAKE(cuIpcGetMemHandle, IpcHandle* handle, Address address) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = allocations.find(address);
  if (found == allocations.end()) return kInvalidValue;
  const int64_t parts[] = {getpid(), found->second.descriptor,
                           static_cast<int64_t>(found->second.bytes)};
  std::memcpy(handle->bytes, parts, sizeof(parts));
  return kSuccess;
}
FAKE(cuIpcOpenMemHandle_v2, Address* address, IpcHandle handle, unsigned) {
  INJECT(cuIpcOpenMemHandle_v2);
  int64_t parts[3];
  std::memcpy(parts, handle.bytes, sizeof(parts));
  if (parts[0] == getpid()) return kInvalidValue;  // like the real driver
  const std::string path = "/proc/" + std::to_string(parts[0]) + "/fd/" + std::to_string(parts[1]);
  const int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return kInvalidValue;
  *address = Map(descriptor, static_cast<size_t>(parts[2]));
  close(descriptor);
  if (!*address) return kOutOfMemory;
  const std::lock_guard<std::mutex> lock(mutex);
  opened[*address] = static_cast<size_t>(parts[2]);
  held.Count("memory of others", 1);
  return kSuccess;
}
FAKE(cuIpcCloseMemHandle, Address address) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = opened.find(address);
  if (found == opened.end()) return kInvalidValue;
  munmap(reinterpret_cast<void*>(address), found->second);
  opened.erase(found);
  held.Count("memory of others", -1);
  return kSuccess;
}

}  // namespace tfdist::cuda
