#include "transport/socket.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>
#include <mutex>
#include <set>

namespace tfdist {
namespace {

struct OpenSockets {
  std::mutex mutex;
  std::set<int> descriptors;
};

// Returns the open sockets, which a forked child must close. The object is never destroyed, because
// threads of other libraries may still use it while the process exits.
OpenSockets& Open() {
  static OpenSockets* const open = new OpenSockets;
  return *open;
}

void InForkedChild() {
  for (const int descriptor : Open().descriptors) close(descriptor);
  Open().descriptors.clear();
  Open().mutex.unlock();
}

}  // namespace

Socket::Socket(int descriptor) : descriptor_(descriptor) {
  static const int hooked =
      pthread_atfork([] { Open().mutex.lock(); }, [] { Open().mutex.unlock(); }, InForkedChild);
  (void)hooked;
  {
    const std::lock_guard<std::mutex> lock(Open().mutex);
    Open().descriptors.insert(descriptor_);
  }
  fcntl(descriptor_, F_SETFL, fcntl(descriptor_, F_GETFL) | O_NONBLOCK);
  const int yes = 1;
  // This call fails if the socket is not a TCP socket. The failure is ignored, because only TCP
  // sockets need the option.
  setsockopt(descriptor_, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
}

// Holds the lock while the descriptor is removed from the set and closed. A child that is forked
// between these two steps would keep its copy of the socket open.
Socket::~Socket() {
  const std::lock_guard<std::mutex> lock(Open().mutex);
  Open().descriptors.erase(descriptor_);
  close(descriptor_);
}

ssize_t Socket::Read(char* data, size_t bytes) { return recv(descriptor_, data, bytes, 0); }

ssize_t Socket::Write(const char* data, size_t bytes) {
  return send(descriptor_, data, bytes, MSG_NOSIGNAL);
}

TcpStatistics ReadTcpStatistics(int descriptor) {
  tcp_info info = {};
  socklen_t length = sizeof(info);
  if (getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return {};
  TcpStatistics statistics;
  statistics.acknowledged_bytes = info.tcpi_bytes_acked;
  statistics.busy_us = info.tcpi_busy_time;
  int pending = 0;
  if (ioctl(descriptor, SIOCOUTQ, &pending) == 0) {
    statistics.pending_bytes = static_cast<uint64_t>(pending);
  }
  statistics.bytes_per_second = info.tcpi_delivery_rate;
  statistics.round_trip_us = info.tcpi_rtt;
  statistics.retransmits = info.tcpi_total_retrans;
  statistics.silent_ms = info.tcpi_last_ack_recv;
  return statistics;
}

}  // namespace tfdist
