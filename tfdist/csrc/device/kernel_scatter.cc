#include "device/kernel_scatter.h"

#include "device/tiling.h"

namespace tfdist {
namespace {

constexpr size_t kWord = sizeof(uint32_t);

std::vector<device::Target> TargetsOf(const std::vector<RowSums>& tensors) {
  std::vector<device::Target> targets;
  for (const RowSums& tensor : tensors) {
    targets.push_back({tensor.values, static_cast<uint32_t>(tensor.count), 0, 0});
  }
  return targets;
}

}  // namespace

std::vector<const char*> ScatterKernelNames() {
#define TFDIST_NAMES(name) "tfdist_" #name,
  return {TFDIST_FOR_SCATTER_KERNELS(TFDIST_NAMES)};
#undef TFDIST_NAMES
}

size_t KernelScatter::ScratchBytes() const { return (2 * ranks_ + 3) * kWord; }

void KernelScatter::Sum(const Row* rows, size_t count, const std::vector<RowSums>& tensors,
                        cuda::Address scratch) const {
  size_t values = 0;
  for (const RowSums& tensor : tensors) values += tensor.count;
  auto* const words = cuda::PointerTo<uint32_t>(scratch);
  const device::RowRuns runs{static_cast<uint32_t>(ranks_), words, words + 1, words + 2,
                             words + 2 + ranks_};
  const auto some = static_cast<uint32_t>(count);
  gpu_.Use();
  cuda::Check(cuda::Load().cuMemsetD32Async(scratch, 0, 2, stream_), "cuMemsetD32Async");
  if (some > 0) {
    kernels_.Launch("tfdist_scatter_find", BlocksFor(some, kMostBlocksAlone), kKernelThreads, stream_,
                    rows, some, static_cast<uint32_t>(values), runs);
  }
  kernels_.Launch("tfdist_scatter_order", 1, kKernelThreads, stream_, some, runs);
  for (const device::Targets& list : Tiled(TargetsOf(tensors))) {
    if (list.tiles == 0) continue;
    kernels_.Launch("tfdist_scatter_sum", BlocksForTeams(list.tiles), kKernelThreads, stream_, list,
                    rows, runs);
  }
}

}  // namespace tfdist
