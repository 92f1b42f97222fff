// A two-way stream of bytes to one other rank.
#pragma once

#include <cstddef>

namespace tfdist {

class Link {
 public:
  virtual ~Link() = default;

  // Takes as many bytes as go without waiting, perhaps none.
  // Throws Error(kUnavailable) if the other end is gone.
  virtual size_t Write(const char* data, size_t bytes) = 0;
  virtual size_t Read(char* data, size_t bytes) = 0;

  // What can be polled for progress; -1 where the bell rings instead.
  virtual int descriptor() const { return -1; }
};

}  // namespace tfdist
