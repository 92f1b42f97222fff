// The links of a rank to the other ranks. Within a host, a link consists of ring buffers in shared
// memory. Between hosts, a link is a stream.
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

  // `Write` and `Read` transfer as many bytes as possible without blocking, and return the number
  // of transferred bytes, which may be 0. They throw Error(kUnavailable) if the other end is gone.
  virtual size_t Write(const char* data, size_t bytes) = 0;
  virtual size_t Read(char* data, size_t bytes) = 0;

  // Returns the file descriptor that must be polled before the next transfer. Returns -1 if there
  // is no descriptor, because the other rank signals this rank's futex instead.
  virtual int descriptor() const { return -1; }
};

// A link between two ranks of the same host. It consists of two ring buffers in the host's shared
// memory, one for each direction.
class RingLink : public Link {
 public:
  // Args: host: this rank's view of its host; other: the position of the other rank on this host.
  RingLink(Host& host, int other);

  size_t Write(const char* data, size_t bytes) override;
  size_t Read(char* data, size_t bytes) override;

 private:
  Host& host_;
  const int other_;
};

// A link to a rank on another host, over a stream.
class SocketLink : public Link {
 public:
  // Args: name: the name of the other rank in error messages.
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

// The hosts of a group, and the ranks on each host. The ranks of each host are sorted, and the
// hosts are sorted by their lowest ranks.
struct Topology {
  int rank = 0;
  int size = 1;
  std::vector<std::string> names;       // for each rank, its name in error messages
  std::vector<std::vector<int>> hosts;  // the ranks of each host
  std::vector<int> host_of;             // for each rank, an index into `hosts`
  std::vector<int> place_of;            // for each rank, its index among the ranks of its host

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
  // For each other rank, the link to it. The element of this rank is null.
  std::vector<std::unique_ptr<Link>> links;
  Guard& guard;
  Recorder& recorder;
  Scratch host_scratch = {};  // for collectives within the host
  Scratch link_scratch = {};  // for collectives over links

  Link& link(int other) { return *links[static_cast<size_t>(other)]; }
};

}  // namespace tfdist
