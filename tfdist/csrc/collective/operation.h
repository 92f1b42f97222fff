// A collective or message that a program has requested, independent of the transport and algorithm.
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

// The settings for the compression of a float32 all-reduce.
struct Compression {
  Codec codec;
  // The residual of error feedback, or empty if error feedback is not used. It is as large as the
  // input. It is added to the input before encoding, and then replaced with the encoding error.
  BufferList error;
  // The seed for stochastic rounding. It must be different for each call.
  uint32_t seed = 0;
  // Whether data that stays within a host is also compressed.
  bool within_hosts = false;
  // The object that encodes and decodes the values. If null, the values are encoded and decoded on
  // the CPU.
  Coder* coder = nullptr;
};

struct Operation {
  // The fingerprint contains the name, kind, type, reduction, root and shapes.
  Fingerprint fingerprint;
  // The other rank, if this is a send or a receive.
  int peer = -1;
  // The time when the operation was passed to the queue, on the steady clock. The queue sets it.
  int64_t enqueued = 0;
  // Whether the program continues while the operation runs. This affects only what the flight
  // recorder counts as waiting.
  bool overlaps = false;
  ConstBufferList in;
  BufferList out;
  // This member is not set if the operation uses host memory. For device memory, it is the event
  // that must pass before the memory may be used, or null if the memory may be used immediately. If
  // `allocate` allocates memory later, it records the event again.
  std::optional<cuda::Event*> device;
  // Whether the operation is only launched: it ends as soon as its work has been queued in a GPU's
  // stream, before the GPU has finished the work.
  bool launches = false;
  // Whether the operation moves no data, and only waits until launched operations have finished.
  bool awaits = false;
  // If the process has several GPUs, this list contains one operation for each GPU, in the order of
  // the GPUs. The buffers of each of these operations are in the memory of its GPU. `assembly`
  // collects the operations.
  std::vector<Operation> parts;
  std::shared_ptr<Assembly> assembly;
  // Set only for an all-reduce that sums float32 values.
  std::optional<Compression> compression;

  // Gathers and all-to-alls move rows. A rank may contribute any number of rows, including zero.
  // `sent_rows` contains the number of rows that this rank sends to each rank (for a gather, only
  // one number, which applies to all ranks). `received_rows` contains the number of rows that this
  // rank receives from each rank.
  size_t row_bytes = 1;
  std::vector<size_t> sent_rows;
  std::vector<size_t> received_rows;

  // A function that allocates the result, if the size of the result depends on the numbers of rows
  // of the other ranks. The function receives the number of rows from each rank, and returns the
  // memory for all these rows. The member `received_rows` above is then empty.
  std::function<BufferList(const std::vector<size_t>& received_rows)> allocate;

  // Keeps alive the objects to which the operation refers, until the operation ends.
  std::shared_ptr<void> kept;

  // The object with which the caller can cancel the operation. Null if the operation cannot be
  // canceled.
  std::shared_ptr<Cancellation> cancellation;
};

}  // namespace tfdist
