#include "device/kernel_names.h"

#include "device/kernel_all_reduce.h"
#include "device/kernel_codec.h"

namespace tfdist {

std::vector<const char*> KernelNames() {
  std::vector<const char*> names = AllReduceKernelNames();
  const std::vector<const char*> codecs = CodecKernelNames();
  names.insert(names.end(), codecs.begin(), codecs.end());
  return names;
}

}  // namespace tfdist
