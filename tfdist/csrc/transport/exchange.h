// Runs many sends and receives concurrently over a group's links.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <vector>

#include "transport/fabric.h"
#include "types.h"

namespace tfdist {

// The sends and receives of one collective. Every stream begins with the collective's fingerprint,
// which the receiver compares with its own. Sends on a link stay in order, and so do receives.
class Exchange {
 public:
  Exchange(Fabric& fabric, const Fingerprint& joined);

  // The caller keeps the memory valid until `Run` returns. Before that, results may be written into
  // memory that has been sent: a part of an all-reduce's result exists only once its owner has read
  // all inputs of that part, so the overwritten data have been sent. A link that refers to the
  // memory after `Write` has returned would break this. `fill`, if any, is called once before the
  // first byte is sent, to produce the data.
  using Fill = std::function<void()>;
  void Send(int rank, const void* data, size_t bytes, Fill fill = {});

  // `on_bytes`, if any, receives the number of bytes received so far, whenever it grows; it may
  // call `Send`.
  using OnBytes = std::function<void(size_t received)>;
  void Receive(int rank, void* data, size_t bytes, OnBytes on_bytes = {});

  // Runs until all transfers are complete. Throws Error after a mismatch, a lost rank or an abort.
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
  bool waited_ = false;  // whether this rank has waited so far
};

}  // namespace tfdist
