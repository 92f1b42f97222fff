// What the kernel counts of a TCP connection.
#pragma once

#include <cstdint>

namespace tfdist {

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
