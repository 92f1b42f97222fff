// Runs many sends and receives concurrently over a group's links.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <vector>

#include "transport/fabric.h"
#include "types.h"

namespace tfdist {

// The sends and receives of one collective. A rank first sends its fingerprint of the collective to
// the other rank, and then its data. The receiver compares the fingerprint with its own. The sends
// to a rank are executed in order, and so are the receives from a rank.
class Exchange {
 public:
  Exchange(Fabric& fabric, const Fingerprint& joined);

  // Adds a send of `bytes` bytes to `rank`. The memory at `data` must remain valid until `Run`
  // returns. If `fill` is given, it is called once before the first byte is sent, to write the data
  // to this memory.
  //
  // The memory at `data` may be overwritten before `Run` returns, because a collective may write
  // its result to the memory of its input. In an all-reduce, for example, the result of a part can
  // arrive only after the owner of the part has read all inputs, so this rank has already sent its
  // input. But a link must not use the memory after `Write` has returned.
  using Fill = std::function<void()>;
  void Send(int rank, const void* data, size_t bytes, Fill fill = {});

  // Adds a receive of `bytes` bytes from `rank`. If `on_bytes` is given, this function is called
  // whenever bytes have arrived, with the number of bytes that have arrived so far. It may itself
  // call `Send` and `Receive`.
  using OnBytes = std::function<void(size_t received)>;
  void Receive(int rank, void* data, size_t bytes, OnBytes on_bytes = {});

  // Runs until all sends and receives are complete. Throws Error if fingerprints do not match, if a
  // rank is lost, or if the group is aborted.
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
  bool waited_ = false;  // whether this rank has had to wait for other ranks so far
};

}  // namespace tfdist
