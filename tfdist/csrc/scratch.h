// Memory that is kept between collectives, since fresh pages are slow.
#pragma once

#include <cstddef>
#include <memory>

namespace tfdist {

class Scratch {
 public:
  // At least so many bytes, of any content; valid until the next call.
  char* Take(size_t bytes) {
    if (bytes > bytes_) {
      memory_.reset(new char[bytes]);
      bytes_ = bytes;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<char[]> memory_;
  size_t bytes_ = 0;
};

}  // namespace tfdist
