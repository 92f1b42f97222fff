// The buffers that the ranks of a host put their values into, where the others read them.
//
// Each rank has two, and takes them in turn. A buffer is free again when its rank's next-but-one
// collective begins: all have then come to the meeting of the one between, and so have read it.
#pragma once

#include <cstdint>

#include "device/kernels/waiting.h"

namespace tfdist::device {

struct Staging {
  char* of[kMostRanks];  // of each rank, as this one sees it
  uint32_t rank;
  uint32_t ranks;
  uint64_t part;  // vectors that each rank reduces in two shots; the last ranks may have fewer
};

}  // namespace tfdist::device
