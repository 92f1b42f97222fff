// An NCCL for machines without GPUs. Its ranks are threads or processes of one host that share
// memory. Its work runs in the streams of a driver: the library at the path FAKE_CUDA, or the one
// that the process has loaded as CUDA's.
#include "cpp/fakes/nccl_memory.h"
#include "cpp/fakes/nccl_ranks.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace tfdist::nccl {
namespace {

constexpr Result kSystemError = 2;

Memory memory;

// Test settings, from `fake_nccl_set`.
std::mutex mutex;
std::map<std::string, int> settings, calls;

int Setting(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = settings.find(name);
  return found == settings.end() ? 0 : found->second;
}

// FAKE_NCCL_VERSION sets it also in other processes.
int Version() {
  const char* const given = std::getenv("FAKE_NCCL_VERSION");
  const int set = given ? std::atoi(given) : Setting("version");
  return set ? set : 22105;
}

Result Called(const char* function) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    ++calls[function];
  }
  return Setting(function);
}

// This thread's calls since ncclGroupStart.
thread_local int depth = 0;
thread_local std::vector<Batch> batches;

Batch& BatchOf(Comm* comm, Stream* stream) {
  for (Batch& batch : batches) {
    if (batch.comm == comm && batch.stream == stream) return batch;
  }
  batches.push_back({comm, stream, {}, {}, 0});
  return batches.back();
}

Result Flush() {
  static const char* const set = std::getenv("FAKE_CUDA");
  static const auto launch = reinterpret_cast<cuda::Result (*)(Stream*, void (*)(void*), void*)>(
      dlsym(dlopen(set ? set : "libcuda.so.1", RTLD_NOW), "cuLaunchHostFunc"));
  for (Batch& each : batches) {
    each.number = each.comm->given++;
    each.comm->polls = Setting("polls");
    each.comm->left = std::this_thread::get_id();
    launch(
        each.stream, [](void* data) { std::unique_ptr<Batch>(static_cast<Batch*>(data))->Run(); },
        new Batch(std::move(each)));
  }
  batches.clear();
  return kSuccess;
}

// Returns success for a call in progress, like older versions.
Result Give(Result injected, Comm* comm, Stream* stream, const std::function<void(Batch&)>& add) {
  if (injected != kSuccess) return injected;
  if (comm->polls > 0) return kInvalidArgument;  // too early
  if (!comm->IsCleared()) return kInvalidUsage;
  add(BatchOf(comm, stream));
  return depth == 0 ? Flush() : kSuccess;
}

void Free(Comm* comm) {
  while (comm->ended < comm->given) std::this_thread::yield();
  if (comm->descriptor >= 0) close(comm->descriptor);
  delete comm;
}

}  // namespace

#define FAKE(result, function, ...)        \
  extern "C" result function(__VA_ARGS__); \
  extern "C" result function(__VA_ARGS__)
#define INJECT(function) \
  if (const Result injected = Called(#function)) return injected

// "version": in the encoding of ncclGetVersion. "polls": how many polls each call stays in
// progress. "error": a later error of all communicators. A function's name: its return value.
FAKE(void, fake_nccl_set, const char* name, int value) {
  const std::lock_guard<std::mutex> lock(mutex);
  settings[name] = value;
}
// The resources that have been handed out and not returned.
FAKE(const char*, fake_nccl_held) { return held.Text(); }
FAKE(int, fake_nccl_calls, const char* function) {
  const std::lock_guard<std::mutex> lock(mutex);
  return calls[function];
}

FAKE(Result, ncclGetVersion, int* version) {
  *version = Version();
  return kSuccess;
}
FAKE(const char*, ncclGetErrorString, Result result) {
  return result == kRemoteError ? "a rank is gone" : "system error";
}
// If "memory" is set, reports that no memory is left.
FAKE(const char*, ncclGetLastError, Comm*) {
  return Setting("memory") ? "Cuda failure 2 'out of memory'" : "no route\nto host";
}

// An identifier holds a process and its descriptor of the shared memory.
FAKE(Result, ncclGetUniqueId, UniqueId* id) {
  INJECT(ncclGetUniqueId);
  const int descriptor = memfd_create("fake-nccl", MFD_CLOEXEC);
  if (descriptor < 0 || ftruncate(descriptor, sizeof(Shared)) != 0) return kSystemError;
  const int64_t parts[] = {getpid(), descriptor};
  *id = {};
  std::memcpy(id->bytes, parts, sizeof(parts));
  return kSuccess;
}
FAKE(Result, ncclCommInitRankConfig, Comm** out, int size, UniqueId id, int rank, Config* config) {
  INJECT(ncclCommInitRankConfig);
  const bool is_known = config->size == 48 && config->magic == 0xcafebeef &&
                        config->version == 22100 && config->cluster_size == INT_MIN &&
                        config->split_share == INT_MIN && !config->network;
  if (!is_known || config->blocking != 0 || rank < 0 || rank >= size || size > kMaxRanks) {
    return kInvalidArgument;
  }
  int64_t parts[2];
  std::memcpy(parts, id.bytes, sizeof(parts));
  const std::string path = "/proc/" + std::to_string(parts[0]) + "/fd/" + std::to_string(parts[1]);
  const int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return kSystemError;
  void* const data =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  close(descriptor);
  if (data == MAP_FAILED) return kSystemError;
  auto* const comm = *out = new Comm();
  comm->rank = rank;
  comm->size = size;
  comm->shared = static_cast<Shared*>(data);
  comm->polls = Setting("polls");
  comm->left = std::this_thread::get_id();
  if (rank == 0 && parts[0] == getpid()) comm->descriptor = static_cast<int>(parts[1]);
  ++comm->shared->joined;
  return kInProgress;
}
FAKE(Result, ncclCommCount, Comm* comm, int* count) {
  INJECT(ncclCommCount);
  if (!comm->IsCleared()) return kInvalidUsage;
  *count = comm->size;
  return kSuccess;
}
FAKE(Result, ncclCommGetAsyncError, Comm* comm, Result* error) {
  INJECT(ncclCommGetAsyncError);
  *error = Setting("error");
  if (*error != kSuccess) return kSuccess;
  const bool ends = comm->finalizing && comm->ended < comm->given;
  const auto ranks = static_cast<uint64_t>(comm->size);
  const bool joins = comm->shared->joined < ranks || comm->shared->windows < ranks * comm->windows;
  const bool waits = joins || ends;
  if (waits || comm->polls > 0) *error = kInProgress;
  if (!waits && comm->polls > 0) --comm->polls;
  return kSuccess;
}
FAKE(Result, ncclCommFinalize, Comm* comm) {
  INJECT(ncclCommFinalize);
  if (Setting("error")) return Setting("error");
  if (!comm->IsCleared()) return kInvalidUsage;
  comm->finalizing = true;
  return kInProgress;
}
FAKE(Result, ncclCommDestroy, Comm* comm) {
  INJECT(ncclCommDestroy);
  Free(comm);
  return kSuccess;
}
FAKE(Result, ncclCommAbort, Comm* comm) {
  Called("ncclCommAbort");
  comm->aborted = true;
  memory.DeregisterAll(comm);
  Free(comm);
  return kSuccess;
}

FAKE(Result, ncclGroupStart) {
  INJECT(ncclGroupStart);
  ++depth;
  return kSuccess;
}
FAKE(Result, ncclGroupEnd) {
  INJECT(ncclGroupEnd);
  if (--depth > 0) return kSuccess;
  Flush();
  return Setting("polls") ? kInProgress : kSuccess;
}

FAKE(Result, ncclAllReduce, const void* in, void* out, size_t count, Type type, Op op, Comm* comm,
     Stream* stream) {
  return Give(Called("ncclAllReduce"), comm, stream, [=](Batch& batch) {
    batch.collectives.push_back([=] {
      comm->Exchange(in, count * SizeOf(type), [&](size_t done, size_t now) {
        std::vector<const char*> parts;
        for (int rank = 0; rank < comm->size; ++rank) parts.push_back(comm->shared->slots[rank]);
        Reduce(type, op, parts, now / SizeOf(type), static_cast<char*>(out) + done);
      });
    });
  });
}
FAKE(Result, ncclReduceScatter, const void* in, void* out, size_t count, Type type, Op op,
     Comm* comm, Stream* stream) {
  return Give(Called("ncclReduceScatter"), comm, stream, [=](Batch& batch) {
    batch.collectives.push_back([=] {
      const size_t bytes = count * SizeOf(type);
      std::vector<char> kept(bytes);  // the output may overlap the input
      for (int to = 0; to < comm->size; ++to) {
        const char* const part = static_cast<const char*>(in) + static_cast<size_t>(to) * bytes;
        comm->Exchange(part, bytes, [&](size_t done, size_t now) {
          if (to != comm->rank) return;
          std::vector<const char*> parts;
          for (int rank = 0; rank < comm->size; ++rank) parts.push_back(comm->shared->slots[rank]);
          Reduce(type, op, parts, now / SizeOf(type), kept.data() + done);
        });
      }
      std::copy(kept.begin(), kept.end(), static_cast<char*>(out));
    });
  });
}
FAKE(Result, ncclAllGather, const void* in, void* out, size_t count, Type type, Comm* comm,
     Stream* stream) {
  return Give(Called("ncclAllGather"), comm, stream, [=](Batch& batch) {
    batch.collectives.push_back([=] {
      const size_t bytes = count * SizeOf(type);
      comm->Exchange(in, bytes, [&](size_t done, size_t now) {
        for (int rank = 0; rank < comm->size; ++rank) {
          char* const to = static_cast<char*>(out) + static_cast<size_t>(rank) * bytes + done;
          std::memcpy(to, comm->shared->slots[rank], now);
        }
      });
    });
  });
}
FAKE(Result, ncclBroadcast, const void* in, void* out, size_t count, Type type, int root,
     Comm* comm, Stream* stream) {
  return Give(Called("ncclBroadcast"), comm, stream, [=](Batch& batch) {
    batch.collectives.push_back([=] {
      comm->Exchange(comm->rank == root ? in : out, count * SizeOf(type),
                     [&](size_t done, size_t now) {
                       std::memcpy(static_cast<char*>(out) + done, comm->shared->slots[root], now);
                     });
    });
  });
}
FAKE(Result, ncclSend, const void* in, size_t count, Type type, int peer, Comm* comm,
     Stream* stream) {
  return Give(Called("ncclSend"), comm, stream, [=](Batch& batch) {
    auto* const data = static_cast<char*>(const_cast<void*>(in));
    batch.messages.push_back({true, data, count * SizeOf(type), peer});
  });
}
FAKE(Result, ncclRecv, void* out, size_t count, Type type, int peer, Comm* comm, Stream* stream) {
  return Give(Called("ncclRecv"), comm, stream, [=](Batch& batch) {
    batch.messages.push_back({false, static_cast<char*>(out), count * SizeOf(type), peer});
  });
}

FAKE(Result, ncclMemAlloc, void** data, size_t bytes) {
  INJECT(ncclMemAlloc);
  *data = memory.Allocate(bytes);
  return kSuccess;
}
FAKE(Result, ncclMemFree, void* data) { return memory.Free(data); }
FAKE(Result, ncclCommRegister, const Comm* comm, void* data, size_t, void** handle) {
  INJECT(ncclCommRegister);
  return memory.Register(comm, data, handle);
}
FAKE(Result, ncclCommDeregister, const Comm* comm, void* handle) {
  return memory.Deregister(comm, handle);
}

// All ranks register a window together.
Result WindowRegister(Comm* comm, void* data, size_t, Window** window, int how) {
  INJECT(ncclCommWindowRegister);
  if (how != kSymmetric) return kInvalidArgument;
  void* handle = nullptr;
  if (const Result result = memory.Register(comm, data, &handle)) return result;
  *window = static_cast<Window*>(handle);
  ++comm->windows;
  ++comm->shared->windows;
  return kInProgress;
}
Result WindowDeregister(Comm* comm, Window* window) { return memory.Deregister(comm, window); }

// Versions before 2.27 have no windows, which callers detect by looking up the functions.
constexpr int kFirstWithWindows = 22700;
extern "C" {
static decltype(&WindowRegister) FindWindowRegister() {
  return Version() < kFirstWithWindows ? nullptr : WindowRegister;
}
static decltype(&WindowDeregister) FindWindowDeregister() {
  return Version() < kFirstWithWindows ? nullptr : WindowDeregister;
}
Result ncclCommWindowRegister(Comm*, void*, size_t, Window**, int)
    __attribute__((ifunc("FindWindowRegister")));
Result ncclCommWindowDeregister(Comm*, Window*) __attribute__((ifunc("FindWindowDeregister")));
}

}  // namespace tfdist::nccl
