// The ranks that take part in a transfer, in an order that all of them know.
#pragma once

#include <vector>

#include "transport/fabric.h"

namespace tfdist {

struct Members {
  std::vector<int> ranks;
  int me = 0;  // this rank's position among them
};

Members Everyone(const Topology& topology);

// The ranks at this one's place on every host; each host has that place.
Members Counterparts(const Topology& topology);

}  // namespace tfdist
