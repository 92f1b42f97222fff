// Describes a requested collective, regardless of how it will run.
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

// Compression of a float32 all-reduce.
struct Compression {
  Codec codec;
  // Error-feedback residual, the size of the input: added before encoding, replaced by the encoding
  // error. Empty for none.
  BufferList error;
  uint32_t seed = 0;          // seed of stochastic rounding; different each time
  bool within_hosts = false;  // compress traffic within hosts also
  Coder* coder = nullptr;     // runs the codec; null for the processor
};

struct Operation {
  Fingerprint fingerprint;  // kind, type, reduction, root, shapes
  int peer = -1;            // of a send or a receive
  int64_t enqueued = 0;     // request time, on the steady clock; set by the queue
  bool overlaps = false;    // the program continues meanwhile; for the recorder
  ConstBufferList in;
  BufferList out;
  // For device memory: the event after which the memory may be used, null for none; `allocate`
  // records it again. Empty for host memory.
  std::optional<cuda::Event*> device;
  // launches: the operation ends once its work is queued in a GPU's stream. awaits: the operation
  // only waits for the results of launched operations.
  bool launches = false;
  bool awaits = false;
  // One operation per GPU, in order, if the process has several. Each part holds its own memory and
  // related fields. The assembly combines the parts.
  std::vector<Operation> parts;
  std::shared_ptr<Assembly> assembly;
  std::optional<Compression> compression;  // of an all-reduce; a sum of float32

  // Gathers and all-to-alls move rows. Row counts may be zero and may differ between ranks: the
  // rows sent to each rank (a single number for a gather) and received from each rank.
  size_t row_bytes = 1;
  std::vector<size_t> sent_rows;
  std::vector<size_t> received_rows;

  // Allocates a result if its size depends on the other ranks' row counts. Receives the number of
  // rows from each rank and returns the destination. The member `received_rows` is then empty.
  std::function<BufferList(const std::vector<size_t>& received_rows)> allocate;

  // Keeps the referenced objects alive until the operation ends.
  std::shared_ptr<void> kept;

  // Cancellation request; null if the operation cannot be canceled.
  std::shared_ptr<Cancellation> cancellation;
};

}  // namespace tfdist
