#include "device/fusion.h"

#include <algorithm>

#include "device/gpu.h"

namespace tfdist {
namespace {

using device::List;

// Tensors of this size or larger are reduced separately, because packing and unpacking them would
// take more time than a separate call of NCCL.
constexpr size_t kLarge = size_t{1} << 20;

uint64_t Vectors(size_t bytes) { return (bytes + device::kVectorBytes - 1) / device::kVectorBytes; }

}  // namespace

Fused Fuse(const std::vector<KernelAllReduce::Tensor>& tensors, size_t buffer_bytes) {
  const uint64_t most = buffer_bytes / device::kVectorBytes;
  Fused fused;
  List list{};
  const auto flush = [&] {
    if (list.count == 1) {  // a single tensor need not be packed
      const device::Span& span = list.spans[0];
      fused.alone.push_back({cuda::AddressOf(span.in), cuda::AddressOf(span.out), span.bytes});
    } else if (list.count > 1) {
      fused.lists.push_back(list);
    }
    list = {};
  };
  for (const KernelAllReduce::Tensor& tensor : tensors) {
    if (tensor.bytes >= std::min(kLarge, buffer_bytes)) {
      fused.alone.push_back(tensor);
      continue;
    }
    if (list.count == List::kMax || list.vectors + Vectors(tensor.bytes) > most) flush();
    list.spans[list.count++] = {cuda::PointerTo<char>(tensor.in), cuda::PointerTo<char>(tensor.out),
                                tensor.bytes, list.vectors};
    list.vectors += Vectors(tensor.bytes);
  }
  flush();
  return fused;
}

FusionBuffer::FusionBuffer(const Gpu& gpu, const KernelModule& kernels, NcclGroup& nccl,
                           size_t bytes)
    : gpu_(gpu), kernels_(kernels), nccl_(nccl), ended_(gpu, sizeof(uint64_t)) {
  address_ = nccl_.Allocate(bytes);
  if (address_) return;
  try {
    plain_ = std::make_unique<DeviceMemory>(gpu_, bytes);
  } catch (const Error& error) {
    throw NoRoom(gpu_, bytes, "small tensors", "TFDIST_DEVICE_BUFFERS", error);
  }
  address_ = plain_->address();
}

FusionBuffer::~FusionBuffer() {
  if (!plain_) nccl_.Free(address_);
}

void FusionBuffer::Pack(const List& list, cuda::Stream* stream) const {
  Launch("tfdist_pack", list, stream);
}

void FusionBuffer::Unpack(const List& list, cuda::Stream* stream) const {
  Launch("tfdist_unpack", list, stream);
}

void FusionBuffer::Launch(const char* kernel, const List& list, cuda::Stream* stream) const {
  device::Staging staging{};
  staging.of[0] = cuda::PointerTo<char>(address_);
  staging.ranks = 1;
  staging.part = list.vectors;
  device::Waiting waiting{};
  waiting.ended = cuda::PointerTo<uint64_t>(ended_.address());
  kernels_.Launch(kernel, BlocksFor(list.vectors, kMaxBlocksAlone), kKernelThreads, stream, list,
                  staging, waiting);
}

}  // namespace tfdist
