#include "transport/tcp_statistics.h"

#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

namespace tfdist {

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
