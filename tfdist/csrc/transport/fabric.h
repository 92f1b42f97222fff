// The links of a rank to the other ranks: rings in shared memory within a host, and streams between
// hosts.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "control/flight_log.h"
#include "error.h"
#include "memory.h"
#include "transport/host.h"
#include "transport/socket.h"

namespace tfdist {

// A bidirectional stream of bytes to one other rank.
class Link {
 public:
  virtual ~Link() = default;

  // Transfers as many bytes as possible without blocking, and returns the number of these bytes,
  // which may be 0. Throws Error(kUnavailable) if the other end is gone.
  virtual size_t Write(const char* data, size_t bytes) = 0;
  virtual size_t Read(char* data, size_t bytes) = 0;

  // Returns the descriptor that must be polled for progress. Returns -1 if the other rank signals
  // this rank's futex event instead.
  virtual int descriptor() const { return -1; }
};

// A link between two ranks of the same host, which consists of two rings in their shared memory.
class RingLink : public Link {
 public:
  // Args: host: this rank's host; other: the position of the other rank on this host.
  RingLink(Host& host, int other);

  size_t Write(const char* data, size_t bytes) override;
  size_t Read(char* data, size_t bytes) override;

 private:
  Host& host_;
  const int other_;
};

// A link to a rank of another host, over a stream.
class SocketLink : public Link {
 public:
  // Args: name: the other rank's name in messages.
  SocketLink(std::unique_ptr<Stream> stream, std::string name);

  size_t Write(const char* data, size_t bytes) override;
  size_t Read(char* data, size_t bytes) override;
  int descriptor() const override { return stream_->descriptor(); }

  std::atomic<uint64_t> sent_bytes{0};
  std::atomic<uint64_t> received_bytes{0};

 private:
  const std::unique_ptr<Stream> stream_;
  const std::string name_;
};

// The hosts of a group, and the ranks on each host. The ranks of a host are in ascending order. The
// hosts are in the order of their first ranks.
struct Topology {
  int rank = 0;
  int size = 1;
  std::vector<std::string> names;       // for each rank, its name in messages
  std::vector<std::vector<int>> hosts;  // the ranks of each host
  std::vector<int> host_of;             // for each rank, an index into `hosts`
  std::vector<int> place_of;            // for each rank, its position on its host

  // Args: host_ids: for each rank, a number that identifies its host.
  static Topology From(int rank, std::vector<std::string> names, const std::vector<int>& host_ids);

  const std::vector<int>& my_host() const {
    return hosts[static_cast<size_t>(host_of[static_cast<size_t>(rank)])];
  }
  int my_place() const { return place_of[static_cast<size_t>(rank)]; }
};

// All connections of a rank to its group: the shared memory of its host, and a link to every other
// rank.
struct Fabric {
  Topology topology;
  std::unique_ptr<Host> host;
  std::vector<std::unique_ptr<Link>> links;  // one for each rank; null for this rank
  Guard& guard;
  Recorder& recorder;
  Scratch host_scratch = {};  // for data that are exchanged within the host
  Scratch link_scratch = {};  // for data that are exchanged over links

  Link& link(int other) { return *links[static_cast<size_t>(other)]; }
};

}  // namespace tfdist
