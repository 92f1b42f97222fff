// The links to the other ranks: rings in shared memory, or streams.
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

  // Transfers as many bytes as possible without blocking, perhaps none, and returns their number.
  // Throws Error(kUnavailable) if the other end is gone.
  virtual size_t Write(const char* data, size_t bytes) = 0;
  virtual size_t Read(char* data, size_t bytes) = 0;

  // The descriptor to poll for progress; -1 if progress signals a futex event instead.
  virtual int descriptor() const { return -1; }
};

// A link between two ranks of one host, through two rings in their segment.
class RingLink : public Link {
 public:
  // Args: this rank's host, and the other rank's position on it.
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

// The placement of ranks. A host's ranks are in ascending order, and so are the hosts by their
// first rank.
struct Topology {
  int rank = 0;
  int size = 1;
  std::vector<std::string> names;       // for messages, one for each rank
  std::vector<std::vector<int>> hosts;  // the ranks of each host
  std::vector<int> host_of;             // for each rank, an index into `hosts`
  std::vector<int> place_of;            // for each rank, its position on its host

  // Args: host_ids: for each rank, a number unique to its host.
  static Topology From(int rank, std::vector<std::string> names, const std::vector<int>& host_ids);

  const std::vector<int>& my_host() const {
    return hosts[static_cast<size_t>(host_of[static_cast<size_t>(rank)])];
  }
  int my_place() const { return place_of[static_cast<size_t>(rank)]; }
};

// A rank's connections to its group: its host's segment, and a link to every rank.
struct Fabric {
  Topology topology;
  std::unique_ptr<Host> host;
  std::vector<std::unique_ptr<Link>> links;  // one per rank, null for this one
  Guard& guard;
  Recorder& recorder;
  Scratch host_scratch = {};  // for data passed between a host's ranks
  Scratch link_scratch = {};  // for data passed over links

  Link& link(int other) { return *links[static_cast<size_t>(other)]; }
};

}  // namespace tfdist
