#include "device/device_setup.h"

#include <algorithm>
#include <set>

#include "device/gpu.h"
#include "device/kernels/lists.h"
#include "error.h"

namespace tfdist {
namespace {

constexpr size_t kMinBufferBytes = 4096;

}  // namespace

void CheckDevice(const DeviceSetup& setup) {
  const std::set<std::string> known{"", "p2p", "nccl", "host", "by_size"};
  if (!known.count(setup.transport)) {
    throw Error(Code::kInvalidArgument,
                "TFDIST_DEVICE_ALGORITHM must be p2p, nccl, host or by_size. Received: " +
                    setup.transport + ".");
  }
  if (setup.buffer_bytes < kMinBufferBytes || setup.buffer_bytes % device::kVectorBytes != 0) {
    throw Error(Code::kInvalidArgument,
                "TFDIST_DEVICE_BUFFERS must be a multiple of 16, at least 4096. Received: " +
                    std::to_string(setup.buffer_bytes) + ".");
  }
  cuda::Load(setup.cuda);
}

std::vector<KernelAllReduce::Tensor> TensorsOf(const Operation& part) {
  std::vector<KernelAllReduce::Tensor> tensors;
  size_t begin = 0;
  part.in.ForEach(0, part.in.bytes(), [&](const char* data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
      const BasicBuffer<char> out = part.out.At(begin);
      const size_t some = std::min(bytes - done, out.bytes);
      tensors.push_back({cuda::AddressOf(data + done), cuda::AddressOf(out.data), some});
      done += some;
      begin += some;
    }
  });
  return tensors;
}

cuda::Address AddressOf(const ConstBufferList& buffers) {
  return buffers.bytes() ? cuda::AddressOf(buffers.At(0).data) : 0;
}

}  // namespace tfdist
