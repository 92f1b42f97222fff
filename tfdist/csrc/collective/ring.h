// An all-reduce around a ring: each member talks to two others only, however many there are.
#pragma once

#include "collective/direct.h"

namespace tfdist {

// Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", 2009. A sum is rounded at every hop, so it is not for half types.
void RunRing(Fabric& fabric, const Fingerprint& joined, const Members& members,
             const Transfer& transfer);

}  // namespace tfdist
