// A stream socket of this process, in the clear. A forked child does not keep it open: the death of its
// parent must close the connection.
#pragma once

#include "transport/stream.h"

namespace tfdist {

class Socket : public Stream {
 public:
  // Takes over the descriptor.
  explicit Socket(int descriptor);
  ~Socket() override;
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  ssize_t Read(char* data, size_t bytes) override;
  ssize_t Write(const char* data, size_t bytes) override;
  int descriptor() const override { return descriptor_; }

 private:
  const int descriptor_;
};

}  // namespace tfdist
