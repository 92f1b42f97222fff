// The bytes of a connected stream socket, as they are or in TLS.
#pragma once

#include <sys/types.h>

#include <cstddef>

namespace tfdist {

// One thread at a time may use it.
class Stream {
 public:
  virtual ~Stream() = default;

  // As recv() and send() on a socket that does not block: how many bytes, perhaps fewer than asked
  // for; 0 at the end of what comes; -1 and errno, which is EAGAIN where nothing goes for now.
  // After EAGAIN the next bytes to be written must begin with the same as before.
  virtual ssize_t Read(char* data, size_t bytes) = 0;
  virtual ssize_t Write(const char* data, size_t bytes) = 0;

  // What can be polled after EAGAIN.
  virtual int descriptor() const = 0;
};

}  // namespace tfdist
