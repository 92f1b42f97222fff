#include "device/parts.h"

#include <algorithm>

namespace tfdist {
namespace {

cuda::Address AddressOf(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }

}  // namespace

std::vector<KernelAllReduce::Tensor> TensorsOf(const Operation& part) {
  std::vector<KernelAllReduce::Tensor> tensors;
  size_t begin = 0;
  part.in.ForEach(0, part.in.bytes(), [&](const char* data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
      const BasicPiece<char> out = part.out.At(begin);
      const size_t some = std::min(bytes - done, out.bytes);
      tensors.push_back({AddressOf(data + done), AddressOf(out.data), some});
      done += some;
      begin += some;
    }
  });
  return tensors;
}

cuda::Address AddressOf(const ConstPieces& pieces) {
  return pieces.bytes() ? AddressOf(static_cast<const void*>(pieces.At(0).data)) : 0;
}

}  // namespace tfdist
