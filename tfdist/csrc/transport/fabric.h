// How one rank of a group reaches the others: its host's segment, and a link to every rank.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "control/recorder.h"
#include "guard.h"
#include "scratch.h"
#include "transport/host.h"
#include "transport/link.h"

namespace tfdist {

// Who sits where. A host's ranks are in the order of their ranks in the group; so are the hosts,
// by their first rank.
struct Topology {
  int rank = 0;
  int size = 1;
  std::vector<std::string> names;       // for messages, one for each rank
  std::vector<std::vector<int>> hosts;  // the ranks of each host
  std::vector<int> host_of;             // for each rank, an index into `hosts`
  std::vector<int> place_of;            // for each rank, its position on its host

  // Args: for each rank a number that its host alone has.
  static Topology From(int rank, std::vector<std::string> names, const std::vector<int>& host_ids);

  const std::vector<int>& my_host() const {
    return hosts[static_cast<size_t>(host_of[static_cast<size_t>(rank)])];
  }
  int my_place() const { return place_of[static_cast<size_t>(rank)]; }
};

struct Fabric {
  Topology topology;
  std::unique_ptr<Host> host;
  std::vector<std::unique_ptr<Link>> links;  // one for each rank, none for this one
  Guard& guard;
  Recorder& recorder;
  Scratch host_scratch = {};  // for what passes between a host's ranks
  Scratch link_scratch = {};  // for what passes over links

  Link& link(int other) { return *links[static_cast<size_t>(other)]; }
};

}  // namespace tfdist
