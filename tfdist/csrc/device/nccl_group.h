// One rank of an NCCL communicator. Its functions return when NCCL has queued their work in a
// stream. They may wait for other ranks before that, but every wait has a time limit.
#pragma once

#include <cstddef>
#include <functional>
#include <mutex>
#include <vector>

#include "device/gpu.h"
#include "device/nccl.h"
#include "error.h"
#include "types.h"

namespace tfdist {

// Returns whether NCCL can compute a reduction with the result that the host would compute. The
// order of the ranks and the rounding may differ. NCCL cannot be used for the minimum and the
// maximum of floating types, because it drops NaNs. A mean of integers is not supported at all.
bool NcclSupports(DType type, ReduceOp op);

// Only one thread at a time may call the functions that submit work. Meanwhile, other threads may
// call `Poll` and `Abort`.
class NcclGroup {
 public:
  struct Setup {
    const Gpu* gpu;     // the GPU of this rank
    nccl::UniqueId id;  // the result of `NewId`, which is the same on all ranks
    int rank;
    int size;
    // The time limit for all ranks to join, and the time limit for each call to finish.
    double timeout_seconds = 600;
    // The time limit for pending work when the group is destroyed.
    double closing_seconds = 10;
    // A `Guard` that is checked while this rank waits for other ranks and for calls. If it ends a
    // wait by throwing an Error, the group is aborted. May be null.
    Guard* guard = nullptr;
  };
  // Returns the identifier of a new group. Only one rank calls this function, and sends the
  // identifier to all other ranks. An identifier can be used for only one group.
  static nccl::UniqueId NewId();

  // Joins the group. Throws Error(kUnavailable) if not all ranks join within the time limit.
  explicit NcclGroup(const Setup& setup);
  // Waits for pending work. If the work has not finished within `closing_seconds`, aborts it.
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  // `count` is a number of elements. In a reduce-scatter and in an all-gather, it is the size of
  // one rank's part. In all other operations, it is the size of the whole data. `in` and `out` may
  // be the same address. In a reduce-scatter and in an all-gather, one buffer has the size of the
  // whole data, and the other buffer has the size of one part. The smaller buffer may then lie
  // within the larger buffer, at the position of this rank's part.
  void AllReduce(cuda::Address in, cuda::Address out, size_t count, DType type, ReduceOp op,
                 cuda::Stream* stream);
  void ReduceScatter(cuda::Address in, cuda::Address out, size_t count, DType type, ReduceOp op,
                     cuda::Stream* stream);
  void AllGather(cuda::Address in, cuda::Address out, size_t count, DType type,
                 cuda::Stream* stream);
  void Broadcast(cuda::Address in, cuda::Address out, size_t count, DType type, int root,
                 cuda::Stream* stream);
  void Send(cuda::Address in, size_t count, DType type, int to, cuda::Stream* stream);
  void Recv(cuda::Address out, size_t count, DType type, int from, cuda::Stream* stream);

  // `Allocate` allocates GPU memory, and returns 0 if NCCL cannot allocate it. NCCL can read and
  // write this memory without additional copies when all ranks have called `Register` together.
  // `Free` must be called before the group is destroyed.
  cuda::Address Allocate(size_t bytes);
  void Register(cuda::Address memory, size_t bytes);
  void Free(cuda::Address memory) noexcept;

  // Calls `body`, and launches all NCCL calls that `body` makes together. This is required if a
  // rank exchanges messages with several ranks, and if one thread makes calls for several ranks of
  // its process. Otherwise, the first call could wait for a later call. If `body` throws an
  // exception, all groups are aborted, because the other ranks may wait for the calls that are
  // missing.
  static void Grouped(const std::vector<NcclGroup*>& groups, const std::function<void()>& body);
  void Grouped(const std::function<void()>& body) { Grouped({this}, body); }

  // Throws Error if NCCL has reported a failure, or if the group has been aborted.
  void Poll();
  // Ends the pending work on this rank, and eventually on the other ranks. All later calls throw
  // Error(kUnavailable). If another thread is executing an NCCL call, `Abort` first waits until
  // this call returns.
  void Abort() noexcept;

 private:
  void Launch(const char* function, const std::function<nccl::Result(nccl::Comm*)>& call);
  void Settle(const char* function);
  void CheckGuard();
  nccl::Result State();
  nccl::Comm* Living() const;

  const Setup setup_;
  const nccl::Library& nccl_;
  // Locked during each NCCL call, or from the beginning to the end of a group of calls.
  std::recursive_mutex mutex_;
  nccl::Comm* comm_ = nullptr;  // null after an abort
  bool grouping_ = false;
  // The registration of the allocated memory: a window, or a handle in versions of NCCL without
  // windows.
  nccl::Window* window_ = nullptr;
  void* handle_ = nullptr;
};

}  // namespace tfdist
