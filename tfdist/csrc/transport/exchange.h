// Runs many sends and receives concurrently over a group's links.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <vector>

#include "transport/fabric.h"
#include "types.h"

namespace tfdist {

// What one collective sends and receives. Every stream begins with the collective's fingerprint,
// which the receiver compares with its own. On each link the sends go in the order given, and so
// do the receives.
class Exchange {
 public:
  Exchange(Fabric& fabric, const Fingerprint& joined);

  // The memory stays the caller's until `Run` returns. Results may land in it meanwhile: a part of
  // an all-reduce's result exists only once its owner has read all of that part, so what is
  // overwritten has been sent. A link that refers to the memory after `Write` has returned would
  // break this. `fill`, if any, is called once before the first byte is sent, to write it.
  using Fill = std::function<void()>;
  void Send(int rank, const void* data, size_t bytes, Fill fill = {});

  // `on_bytes`, if any, is told how many bytes have come each time that some have; it may call
  // `Send`.
  using OnBytes = std::function<void(size_t received)>;
  void Receive(int rank, void* data, size_t bytes, OnBytes on_bytes = {});

  // Runs until all transfers are complete. Throws Error: mismatch, a rank lost, aborted.
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
  bool waited_ = false;  // for anything so far
};

}  // namespace tfdist
