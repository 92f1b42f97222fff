// Streams of bytes over sockets, and TCP statistics of the kernel.
#pragma once

#include <sys/types.h>
#include <cstddef>
#include <cstdint>

namespace tfdist {

// A connected stream socket, unencrypted or with TLS. Only one thread at a time may use it.
class Stream {
 public:
  virtual ~Stream() = default;

  // `Read` and `Write` are like recv() and send() on a nonblocking socket. They return the number
  // of bytes, which may be smaller than requested. `Read` returns 0 at the end of the input. After
  // an error, both return -1 and set errno, to EAGAIN if the call would block. After EAGAIN, the
  // next `Write` must begin with the same bytes.
  virtual ssize_t Read(char* data, size_t bytes) = 0;
  virtual ssize_t Write(const char* data, size_t bytes) = 0;

  // Returns the descriptor to poll after EAGAIN.
  virtual int descriptor() const = 0;
};

// An unencrypted stream socket of this process. A forked child closes its copy of the socket, so
// that the connection ends when the parent dies.
class Socket : public Stream {
 public:
  // Takes ownership of the descriptor.
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

// The kernel's statistics of a TCP connection.
struct TcpStatistics {
  uint64_t acknowledged_bytes = 0;  // sent and acknowledged
  uint64_t busy_us = 0;             // time with data in flight
  uint64_t pending_bytes = 0;       // written but not acknowledged
  uint64_t bytes_per_second = 0;    // recent delivery rate
  uint32_t round_trip_us = 0;       // smoothed
  uint32_t retransmits = 0;         // retransmitted segments
  uint32_t silent_ms = 0;           // time since the last acknowledgment
};

// Returns the statistics of a TCP socket. All numbers are zero if the descriptor is not a TCP
// socket, or if the kernel provides no statistics.
TcpStatistics ReadTcpStatistics(int descriptor);

}  // namespace tfdist
