// Streams of bytes over sockets, and TCP statistics of the kernel.
#pragma once

#include <sys/types.h>
#include <cstddef>
#include <cstdint>

namespace tfdist {

// A connected stream socket, unencrypted or with TLS.
//
// One thread at a time may use it.
class Stream {
 public:
  virtual ~Stream() = default;

  // Like recv() and send() on a nonblocking socket: return the number of bytes, possibly fewer than
  // requested; 0 at the end of the input; -1 with errno, which is EAGAIN if the call would block.
  // After EAGAIN, the next write must begin with the same bytes.
  virtual ssize_t Read(char* data, size_t bytes) = 0;
  virtual ssize_t Write(const char* data, size_t bytes) = 0;

  // The descriptor to poll after EAGAIN.
  virtual int descriptor() const = 0;
};

// An unencrypted stream socket of this process. A forked child does not keep it open: the death of
// its parent must close the connection.
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
  uint32_t silent_ms = 0;           // since the last acknowledgment
};

// Returns zeros if the descriptor is not a TCP socket or the kernel provides no statistics.
TcpStatistics ReadTcpStatistics(int descriptor);

}  // namespace tfdist
