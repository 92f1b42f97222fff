#include "device/device_setup.h"

#include <set>

#include "device/cuda.h"
#include "device/kernels/lists.h"
#include "error.h"

namespace tfdist {
namespace {

constexpr size_t kLeastBuffer = 4096;

}  // namespace

void CheckDevice(const DeviceSetup& setup) {
  const std::set<std::string> known{"", "own", "nccl", "host", "by_size"};
  if (!known.count(setup.transport)) {
    throw Error(Code::kInvalidArgument,
                "TFDIST_DEVICE_ALGORITHM must be own, nccl, host or by_size. Received: " + setup.transport +
                    ".");
  }
  if (setup.buffer_bytes < kLeastBuffer || setup.buffer_bytes % device::kVectorBytes != 0) {
    throw Error(Code::kInvalidArgument,
                "TFDIST_DEVICE_BUFFERS must be a multiple of 16, at least 4096. Received: " +
                    std::to_string(setup.buffer_bytes) + ".");
  }
  cuda::Load(setup.cuda);
}

}  // namespace tfdist
