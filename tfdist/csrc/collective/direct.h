// A transfer among some ranks over their links: each sends to every other one directly.
#pragma once

#include "collective/members.h"
#include "collective/transfer.h"
#include "transport/exchange.h"
#include "transport/fabric.h"

namespace tfdist {

// All members call this together. Each part is reduced by its owner, in the members' order, while
// it still arrives, and leaves again chunk by chunk.
void RunDirect(Fabric& fabric, const Fingerprint& joined, const Members& members,
               const Transfer& transfer);

// The same for a small all-reduce: everyone sends everything to everyone, one way instead of two.
void RunWhole(Fabric& fabric, const Fingerprint& joined, const Members& members,
              const Transfer& transfer);

}  // namespace tfdist
