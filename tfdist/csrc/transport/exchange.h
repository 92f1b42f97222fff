// Runs many sends and receives concurrently over a group's links.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <vector>

#include "transport/fabric.h"
#include "types.h"

namespace tfdist {

// The sends and receives of one collective. The data that a rank sends to another rank begin with
// the collective's fingerprint, which the receiver compares with its own fingerprint. The sends to
// a rank are executed in order, and so are the receives from a rank.
class Exchange {
 public:
  Exchange(Fabric& fabric, const Fingerprint& joined);

  // Adds a send of `bytes` bytes to `rank`. The caller keeps the memory valid until `Run` returns.
  // If `fill` is given, it is called once before the first byte is sent, and writes the data into
  // this memory.
  //
  // The result of a collective may overwrite its input before `Run` returns. In an all-reduce, for
  // example, the result of a part exists only after the owner of the part has read all inputs, so
  // these inputs have already been sent. A link must therefore not use the memory after `Write` has
  // returned.
  using Fill = std::function<void()>;
  void Send(int rank, const void* data, size_t bytes, Fill fill = {});

  // Adds a receive of `bytes` bytes from `rank`. If `on_bytes` is given, it is called whenever
  // bytes have arrived, with the number of bytes received so far. It may call `Send` and `Receive`.
  using OnBytes = std::function<void(size_t received)>;
  void Receive(int rank, void* data, size_t bytes, OnBytes on_bytes = {});

  // Runs until all sends and receives are complete. Throws Error after a mismatch, a lost rank or
  // an abort.
  void Run();

 private:
  struct Outgoing {
    const char* data;
    size_t bytes;
    Fill fill;
  };
  struct Incoming {
    char* data;
    size_t bytes;
    size_t received;
    OnBytes on_bytes;
  };
  struct Stream {
    std::deque<Outgoing> out;
    std::deque<Incoming> in;
    bool opened_out = false;
    bool opened_in = false;
    Fingerprint theirs;
  };

  Stream& At(int rank) { return streams_[static_cast<size_t>(rank)]; }
  bool Advance();
  bool AdvanceOut(int rank, Stream& stream);
  bool AdvanceIn(int rank, Stream& stream);
  void Compare(int rank, const Fingerprint& theirs);
  bool Done() const;
  void Wait();

  Fabric& fabric_;
  Fingerprint joined_;
  std::vector<Stream> streams_;
  bool waited_ = false;  // whether this rank has had to wait for other ranks
};

}  // namespace tfdist
