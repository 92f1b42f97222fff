// Streams of bytes over sockets, and the kernel's statistics of TCP connections.
#pragma once

#include <sys/types.h>
#include <cstddef>
#include <cstdint>

namespace tfdist {

// A connected stream socket, unencrypted or with TLS. Only one thread at a time may use it.
class Stream {
 public:
  virtual ~Stream() = default;

  // `Read` and `Write` behave like recv() and send() on a nonblocking socket. They return the
  // number of transferred bytes, which may be smaller than `bytes`. `Read` returns 0 if the other
  // end has closed the connection. If a call fails, it returns -1 and sets errno. errno is EAGAIN
  // if the call would block. In this case, the data of the next call of `Write` must begin with the
  // same bytes, because they may already be encrypted.
  virtual ssize_t Read(char* data, size_t bytes) = 0;
  virtual ssize_t Write(const char* data, size_t bytes) = 0;

  // Returns the file descriptor to poll after EAGAIN.
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
  uint64_t acknowledged_bytes = 0;  // bytes that were sent and acknowledged
  uint64_t busy_us = 0;             // time during which data was in flight
  uint64_t pending_bytes = 0;       // bytes that were written but not yet acknowledged
  uint64_t bytes_per_second = 0;    // the recent delivery rate
  uint32_t round_trip_us = 0;       // the smoothed round-trip time
  uint32_t retransmits = 0;         // the number of retransmitted segments
  uint32_t silent_ms = 0;           // the time since the last acknowledgment
};

// Returns the statistics of a TCP socket. All numbers are zero if the descriptor is not a TCP
// socket, or if the kernel provides no statistics.
TcpStatistics ReadTcpStatistics(int descriptor);

}  // namespace tfdist
