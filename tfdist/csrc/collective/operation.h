// A collective to be run: what was asked for, independent of how it will be done.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "codec/codec.h"
#include "error.h"
#include "memory.h"
#include "types.h"

namespace tfdist {

namespace cuda {
struct Event;
}
class Assembly;

class Coder;

// How an all-reduce of float32 is made smaller on its way.
struct Compression {
  Codec codec;
  // What this rank has not sent so far, as large as the values; it is added to them, and what is
  // then not sent is left here. Empty for none.
  Pieces error;
  uint32_t seed = 0;          // of what is random; another one each time
  bool within_hosts = false;  // not only what crosses hosts
  Coder* coder = nullptr;     // what computes; null for the processor
};

struct Operation {
  Fingerprint fingerprint;  // kind, type, reduction, root, shapes
  int peer = -1;            // of a send or a receive
  int64_t enqueued = 0;     // when it was asked for, by the steady clock; set by the queue
  bool overlaps = false;    // whether the program goes on beside it; for the recorder
  ConstPieces in;
  Pieces out;
  // Of memory on a GPU: what has to pass in its streams before it is used, null for nothing; looked
  // at again once `allocate` has made room. None if the memory is the host's.
  std::optional<cuda::Event*> device;
  // Whether it has ended once it runs on the GPU; what `awaits` comes behind it and has the result.
  bool launches = false;
  bool awaits = false;
  // Where a process has several GPUs, what each of them brings, in their order; the memory and what
  // belongs to it are theirs alone. They come together in the assembly.
  std::vector<Operation> parts;
  std::shared_ptr<Assembly> assembly;
  std::optional<Compression> compression;  // of an all-reduce; a sum of float32

  // Gathers and all-to-alls move rows, which may be empty, and of which ranks may bring different
  // numbers: what goes to each rank (a gather has one number for all), and what comes from each.
  size_t row_bytes = 1;
  std::vector<size_t> sent_rows;
  std::vector<size_t> received_rows;

  // For results whose size is known only after the ranks have told their rows: given those that
  // come from each rank, returns where they go. `received_rows` is then empty.
  std::function<Pieces(const std::vector<size_t>& received_rows)> allocate;

  // Kept until the operation is over, since it refers to it.
  std::shared_ptr<void> kept;

  // Whether its end is wished for; none where that cannot be.
  std::shared_ptr<Cancellation> cancellation;
};

}  // namespace tfdist
