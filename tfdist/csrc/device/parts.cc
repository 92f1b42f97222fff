#include "device/parts.h"

#include <algorithm>

namespace tfdist {

std::vector<KernelAllReduce::Tensor> TensorsOf(const Operation& part) {
  std::vector<KernelAllReduce::Tensor> tensors;
  size_t begin = 0;
  part.in.ForEach(0, part.in.bytes(), [&](const char* data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
      const BasicPiece<char> out = part.out.At(begin);
      const size_t some = std::min(bytes - done, out.bytes);
      tensors.push_back({cuda::AddressOf(data + done), cuda::AddressOf(out.data), some});
      done += some;
      begin += some;
    }
  });
  return tensors;
}

cuda::Address AddressOf(const ConstPieces& pieces) {
  return pieces.bytes() ? cuda::AddressOf(pieces.At(0).data) : 0;
}

}  // namespace tfdist
