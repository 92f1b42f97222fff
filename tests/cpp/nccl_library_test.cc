// How NCCL is found, and which libraries are refused. FAKE_NCCL is the path of the fake one.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>

#include "cpp/calls.h"
#include "cpp/ranks.h"
#include "device/nccl.h"

namespace tfdist::testing {
namespace {

std::string library;

void* Opened(const std::string& path) {
  void* const opened = dlopen(path.c_str(), RTLD_NOW);
  EXPECT(opened);
  return opened;
}

void Set(void* opened, const char* name, int value) {
  reinterpret_cast<void (*)(const char*, int)>(dlsym(opened, "fake_nccl_set"))(name, value);
}

// In a separate process, since a process has one NCCL.
void Apart(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    try {
      body();
      _exit(0);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      _exit(1);
    }
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT(status == 0);
}

void IsRefused(const std::string& path, const std::vector<std::string>& words) {
  ExpectError([&] { nccl::Load(path); }, Code::kInvalidArgument, words);
}

void Missing() {
  Apart([] {
    IsRefused("/no/libnccl.so.2", {"The GPUs cannot be used", "there is no NCCL (/no/libnccl.so.2",
                                   "pip install tensorflow[and-cuda]"});
    // It is searched again, since nothing has been loaded.
    IsRefused("libdl.so.2", {"libdl.so.2 lacks ncclGetVersion. Install NCCL 2.21.0 or newer"});
  });
}

void Versions() {
  for (const auto& [code, said] : std::vector<std::pair<int, std::string>>{
           {2804, "is NCCL 2.8.4. Install NCCL 2.21.0 or newer"},
           {2708, "is NCCL 2.7.8."},
           {20900, "is NCCL 2.9.0."},
           {21805, "is NCCL 2.18.5."}}) {
    Apart([code = code, said = said] {
      Set(Opened(library), "version", code);
      IsRefused(library, {library + " " + said});
    });
  }
  for (const auto& [code, said] : std::vector<std::pair<int, std::string>>{{22100, "2.21.0"},
                                                                           {22105, "2.21.5"},
                                                                           {22605, "2.26.5"},
                                                                           {22703, "2.27.3"},
                                                                           {23203, "2.32.3"},
                                                                           {30001, "3.0.1"}}) {
    Apart([code = code, said = said] {
      Set(Opened(library), "version", code);
      const nccl::Library& found = nccl::Load(library);
      EXPECT(found.version == code && nccl::VersionOf(found.version) == said);
      EXPECT(found.ncclMemAlloc && found.ncclCommRegister);
      EXPECT((found.ncclCommWindowRegister != nullptr) == (code >= 22700));
      EXPECT((found.ncclCommWindowDeregister != nullptr) == (code >= 22700));
      EXPECT(&nccl::Load() == &found);
    });
  }
}

// Functions that a build may lack, and functions that it must have.
void Functions() {
  void* const opened = Opened(library);
  const auto without = [&](const std::string& part) {
    return nccl::Resolve(
        [&](const char* name) {
          return std::string(name).find(part) == std::string::npos ? dlsym(opened, name) : nullptr;
        },
        "libnccl.so.2");
  };
  const nccl::Library plain = without("Register");
  EXPECT(!plain.ncclCommRegister && plain.ncclMemAlloc && plain.ncclSend);
  ExpectError([&] { without("ncclCommAbort"); }, Code::kInvalidArgument,
              {"libnccl.so.2 lacks ncclCommAbort. Install NCCL 2.21.0 or newer"});
}

// A copy under another path is another library, like that of another Python package.
void Second() {
  const std::string copy = "/tmp/nccl-" + std::to_string(getpid()) + ".so";
  std::filesystem::copy_file(library, copy, std::filesystem::copy_options::overwrite_existing);
  for (const int version : {22105, 22602}) {
    Apart([&] {
      Set(Opened(copy), "version", version);
      if (version == 22105) {
        EXPECT(nccl::Load(library).version == version);
      } else {
        IsRefused(library, {"the process has loaded NCCL 2.26.2 of " + copy + ", and NCCL 2.21.5 " +
                                "of " + library + " would be a second one",
                            "LD_LIBRARY_PATH"});
      }
    });
  }
  std::filesystem::remove(copy);
}

}  // namespace
}  // namespace tfdist::testing

int main() {
  using namespace tfdist::testing;
  library = std::getenv("FAKE_NCCL");
  return Report([] {
    Missing();
    Versions();
    Second();
    Functions();
  });
}
