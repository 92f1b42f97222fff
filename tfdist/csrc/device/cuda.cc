#include "device/cuda.h"

#include <dlfcn.h>

#include <algorithm>
#include <iterator>

#include "error.h"

namespace tfdist::cuda {
namespace {

constexpr char kSystems[] = "libcuda.so.1";

// CUDA_ERROR_ECC_UNCORRECTABLE, _ILLEGAL_ADDRESS, _LAUNCH_TIMEOUT, _ASSERT, and _HARDWARE_STACK_ERROR
// to _LAUNCH_FAILED.
constexpr Result kSticky[] = {214, 700, 702, 710, 714, 715, 716, 717, 718, 719};

std::string VersionOf(int number) {
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

// Whether nothing works any more in a process that has had this error.
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
#define TFDIST_RESOLVE(function, arguments)                                              \
  driver.function = reinterpret_cast<Result(*) arguments>(dlsym(opened, #function));     \
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
