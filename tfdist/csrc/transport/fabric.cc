#include "transport/fabric.h"

#include <algorithm>

namespace tfdist {

Topology Topology::From(int rank, std::vector<std::string> names,
                        const std::vector<int>& host_ids) {
  Topology topology;
  topology.rank = rank;
  topology.size = static_cast<int>(names.size());
  topology.names = std::move(names);
  std::vector<int> seen;
  for (int other = 0; other < topology.size; ++other) {
    const int id = host_ids[static_cast<size_t>(other)];
    const auto found = std::find(seen.begin(), seen.end(), id);
    const auto host = static_cast<size_t>(found - seen.begin());
    if (found == seen.end()) {
      seen.push_back(id);
      topology.hosts.emplace_back();
    }
    topology.host_of.push_back(static_cast<int>(host));
    topology.place_of.push_back(static_cast<int>(topology.hosts[host].size()));
    topology.hosts[host].push_back(other);
  }
  return topology;
}

}  // namespace tfdist
