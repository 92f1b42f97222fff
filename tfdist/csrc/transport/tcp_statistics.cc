#include "transport/tcp_statistics.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

namespace tfdist {

TcpStatistics ReadTcpStatistics(int descriptor) {
  tcp_info info = {};
  socklen_t length = sizeof(info);
  if (getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return {};
  TcpStatistics statistics;
  statistics.acknowledged_bytes = info.tcpi_bytes_acked;
  statistics.busy_us = info.tcpi_busy_time;
  statistics.round_trip_us = info.tcpi_rtt;
  statistics.retransmits = info.tcpi_total_retrans;
  return statistics;
}

}  // namespace tfdist
