// A collective to be run: what was asked for, independent of how it will be done.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "codec/codec.h"
#include "fingerprint.h"
#include "pieces.h"

namespace tfdist {

// How an all-reduce of float32 is made smaller on its way.
struct Compression {
  Codec codec;
  // What this rank has not sent so far, as large as the values; it is added to them, and what is
  // then not sent is left here. Empty for none.
  Pieces error;
  uint32_t seed = 0;         // of what is random; another one each time
  bool within_hosts = false;  // not only what crosses hosts
};

struct Operation {
  Fingerprint fingerprint;  // kind, type, reduction, root, shapes
  int peer = -1;            // of a send or a receive
  ConstPieces in;
  Pieces out;
  std::optional<Compression> compression;  // of an all-reduce; a sum of float32

  // Bytes of each rank, for gathers and all-to-alls; empty where all are alike.
  std::vector<size_t> sent_bytes;
  std::vector<size_t> received_bytes;

  // Kept until the operation is over, since it refers to it.
  std::shared_ptr<void> kept;

  // For results whose size is known only after the ranks have told their sizes: given the bytes
  // that come from each rank, returns where they go. `received_bytes` is then empty.
  std::function<Pieces(const std::vector<size_t>& received_bytes)> allocate;
};

}  // namespace tfdist
