// A collective to be run: what was asked for, independent of how it will be done.
#pragma once

#include <functional>
#include <vector>

#include "fingerprint.h"
#include "pieces.h"

namespace tfdist {

struct Operation {
  Fingerprint fingerprint;  // kind, type, reduction, root, shapes
  int peer = -1;            // of a send or a receive
  ConstPieces in;
  Pieces out;

  // Bytes of each rank, for gathers and all-to-alls; empty where all are alike.
  std::vector<size_t> sent_bytes;
  std::vector<size_t> received_bytes;

  // For results whose size is known only after the ranks have told their sizes: given the bytes
  // that come from each rank, returns where they go. `received_bytes` is then empty.
  std::function<Pieces(const std::vector<size_t>& received_bytes)> allocate;
};

}  // namespace tfdist
