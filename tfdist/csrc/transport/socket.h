// Streams of bytes over sockets, and TCP statistics of the kernel.
#pragma once

#include <sys/types.h>
#include <cstddef>
#include <cstdint>

namespace tfdist {

// The bytes of a connected stream socket, as they are or in TLS.
//
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

// A stream socket of this process, in the clear. A forked child does not keep it open: the death of
// its parent must close the connection.
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

// What the kernel counts of a TCP connection.
struct TcpStatistics {
  uint64_t acknowledged_bytes = 0;  // sent, and known to have come
  uint64_t busy_us = 0;             // with something on its way
  uint64_t pending_bytes = 0;       // written, and not known to have come
  uint64_t bytes_per_second = 0;    // as acknowledged lately
  uint32_t round_trip_us = 0;       // smoothed
  uint32_t retransmits = 0;         // segments
  uint32_t silent_ms = 0;           // since the last acknowledgment
};

// All zero where it is no TCP socket, or the kernel does not tell.
TcpStatistics ReadTcpStatistics(int descriptor);

}  // namespace tfdist
