#include "device/kernel_names.h"

#include "device/kernel_all_reduce.h"
#include "device/kernel_codec.h"
#include "device/kernel_scatter.h"
#include "device/kernel_select.h"

namespace tfdist {

std::vector<const char*> KernelNames() {
  std::vector<const char*> names = AllReduceKernelNames();
  for (const auto& more : {CodecKernelNames(), SelectKernelNames(), ScatterKernelNames()}) {
    names.insert(names.end(), more.begin(), more.end());
  }
  return names;
}

}  // namespace tfdist
