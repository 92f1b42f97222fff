// A requested collective or message, independent of how it will run.
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

// The compression of a float32 all-reduce.
struct Compression {
  Codec codec;
  // The residual of error feedback, with the size of the input. It is added to the input before
  // encoding, and then replaced with the encoding error. Empty if there is no error feedback.
  BufferList error;
  uint32_t seed = 0;          // seed of stochastic rounding; different for each call
  bool within_hosts = false;  // whether traffic within hosts is compressed as well
  Coder* coder = nullptr;     // runs the codec; null to run the codec on the CPU
};

struct Operation {
  Fingerprint fingerprint;  // name, kind, type, reduction, root, shapes
  int peer = -1;            // the other rank of a send or a receive
  int64_t enqueued = 0;     // time of the request on the steady clock; the queue sets it
  // Whether the program continues while the operation runs. Only the recorder uses this.
  bool overlaps = false;
  ConstBufferList in;
  BufferList out;
  // The event after which the device memory of the operation may be used. Null if the memory may be
  // used immediately. `allocate` records the event again. Not set if the operation uses host
  // memory.
  std::optional<cuda::Event*> device;
  // Whether the operation ends when its work has been queued in a GPU's stream.
  bool launches = false;
  // Whether the operation has no data, and only waits for the results of launched operations.
  bool awaits = false;
  // If the process has several GPUs: one operation for each GPU, in the order of the GPUs. Each of
  // these operations has the memory of its GPU. `assembly` collects them.
  std::vector<Operation> parts;
  std::shared_ptr<Assembly> assembly;
  std::optional<Compression> compression;  // only for an all-reduce that sums float32

  // Gathers and all-to-alls move rows. The number of rows may be zero, and may differ between
  // ranks. `sent_rows` is the number of rows sent to each rank (a single number for a gather), and
  // `received_rows` is the number of rows received from each rank.
  size_t row_bytes = 1;
  std::vector<size_t> sent_rows;
  std::vector<size_t> received_rows;

  // Allocates the result, if its size depends on the numbers of rows of the other ranks. The
  // function receives the number of rows from each rank, and returns the memory for these rows. In
  // this case, the member `received_rows` above is empty.
  std::function<BufferList(const std::vector<size_t>& received_rows)> allocate;

  // Keeps objects that the operation refers to alive until the operation ends.
  std::shared_ptr<void> kept;

  // The caller's request to cancel the operation. Null if the operation cannot be canceled.
  std::shared_ptr<Cancellation> cancellation;
};

}  // namespace tfdist
