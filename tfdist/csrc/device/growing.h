// Memory that is kept between operations, and grows with what they need.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>

#include "device/gpu.h"

namespace tfdist {

// Args: Memory: DeviceMemory or MappedMemory.
template <typename Memory>
class Growing {
 public:
  // At least so many bytes, of any content; valid until the next call.
  const Memory& Take(const Gpu& gpu, size_t bytes) {
    if (!memory_ || bytes > bytes_) {
      memory_ = nullptr;
      memory_ = std::make_unique<Memory>(gpu, std::max<size_t>(bytes, 1));
      bytes_ = bytes;
    }
    return *memory_;
  }

 private:
  std::unique_ptr<Memory> memory_;
  size_t bytes_ = 0;
};

}  // namespace tfdist
