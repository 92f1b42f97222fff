#include "collective/members.h"

namespace tfdist {

Members Everyone(const Topology& topology) {
  Members members;
  for (int rank = 0; rank < topology.size; ++rank) members.ranks.push_back(rank);
  members.me = topology.rank;
  return members;
}

Members Counterparts(const Topology& topology) {
  Members members;
  for (const auto& host : topology.hosts) {
    members.ranks.push_back(host[static_cast<size_t>(topology.my_place())]);
  }
  members.me = topology.host_of[static_cast<size_t>(topology.rank)];
  return members;
}

}  // namespace tfdist
