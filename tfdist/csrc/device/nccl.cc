#include "device/nccl.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

#include "error.h"

namespace tfdist::nccl {
namespace {

constexpr char kSystems[] = "libnccl.so.2";
constexpr char kGetVersion[] = "ncclGetVersion";
constexpr int kSharing = 23000;  // the first version in which ranks can share a GPU

[[noreturn]] void Refuse(const std::string& why) {
  throw Error(Code::kInvalidArgument, "The GPUs cannot be used by the native collectives: " + why);
}

// Returns NCCL's version as a number such as 20900 for 2.9.0. Versions up to 2.8 report themselves
// in another form, such as 2804 for 2.8.4; the result has the newer form for these versions as
// well.
int Version(Result (*get)(int*)) {
  int code = 0;
  get(&code);
  if (code >= 10000) return code;
  return code / 1000 * 10000 + code % 1000 / 100 * 100 + code % 100;
}

// Describes an NCCL library by its version and its path.
// Args: opened: the handle of the library.
std::string Description(void* opened, int version) {
  Dl_info found{};
  dladdr(dlsym(opened, kGetVersion), &found);
  return "NCCL " + VersionOf(version) + " of " + (found.dli_fname ? found.dli_fname : kSystems);
}

// Throws Error if this process has loaded two NCCL libraries of different versions. Each library
// would need memory and threads, and it would be unclear which of them TensorFlow uses.
// Args: other: the handle of a library that was loaded before, or null; opened: the handle of the
// library that the core will use.
void RefuseSecond(void* other, void* opened, int version) {
  if (!other || other == opened) return;
  const auto get = reinterpret_cast<Result (*)(int*)>(dlsym(other, kGetVersion));
  const int theirs = get ? Version(get) : 0;
  if (theirs == version) return;
  Refuse("the process has loaded " + Description(other, theirs) + ", and " +
         Description(opened, version) +
         " would be a second one. Uninstall one of them, or take its folder out of "
         "LD_LIBRARY_PATH.");
}

Library Open(const std::string& library) {
  const std::string name = library.empty() ? kSystems : library;
  void* const other = dlopen(kSystems, RTLD_NOW | RTLD_NOLOAD);
  void* const opened = dlopen(name.c_str(), RTLD_NOW);
  if (!opened) {
    Refuse("there is no NCCL (" + std::string(dlerror()) +
           "). Install TensorFlow's version: pip install tensorflow[and-cuda].");
  }
  const Library found = Resolve([&](const char* each) { return dlsym(opened, each); }, name);
  RefuseSecond(other, opened, found.version);
  return found;
}

}  // namespace

Library Resolve(const std::function<void*(const char*)>& find, const std::string& name) {
  const std::string newer = " Install NCCL " + VersionOf(kOldest) +
                            " or newer: pip install tensorflow[and-cuda] includes one.";
  Library library;
#define TFDIST_RESOLVE(function, result, arguments) \
  library.function = reinterpret_cast<result(*) arguments>(find(#function));
#define TFDIST_REQUIRE(function, result, arguments) \
  if (!library.function) Refuse(name + " lacks " #function "." + newer);
  TFDIST_NCCL(TFDIST_RESOLVE)
  TFDIST_NCCL_IF_PRESENT(TFDIST_RESOLVE)
  // If the library is too old, report its version, which helps more than the name of a missing
  // function.
  if (library.ncclGetVersion) library.version = Version(library.ncclGetVersion);
  if (library.ncclGetVersion && library.version < kOldest) {
    Refuse(name + " is NCCL " + VersionOf(library.version) + "." + newer);
  }
  TFDIST_NCCL(TFDIST_REQUIRE)
#undef TFDIST_RESOLVE
#undef TFDIST_REQUIRE
  return library;
}

const Library& Load(std::string library) {
  static const Library opened = Open(library);
  return opened;
}

bool LetsRanksShareAGpu(const Library& library) {
  const char* const set = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return library.version >= kSharing && set && std::strcmp(set, "1") == 0;
}

std::string VersionOf(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

void Check(Result result, const char* function) {
  if (result == kSuccess) return;
  const Library& library = Load();
  const char* const text = library.ncclGetErrorString(result);
  const char* const last = library.ncclGetLastError(nullptr);
  std::string more = last ? last : "";
  more = more.substr(0, more.find('\n'));
  throw Error(result == kRemoteError ? Code::kUnavailable : Code::kInternal,
              std::string(function) + " of NCCL " + VersionOf(library.version) + " has failed: " +
                  (text ? text : "unknown error") + (more.empty() ? "" : " (" + more + ")") + "." +
                  (more.find("out of memory") == std::string::npos
                       ? ""
                       : " NCCL needs GPU memory in addition to TensorFlow's: set "
                         "TF_FORCE_GPU_ALLOW_GROWTH=true."));
}

}  // namespace tfdist::nccl
