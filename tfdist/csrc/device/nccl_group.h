// One rank of an NCCL communicator. Its functions return when their work has been queued in a
// stream, and every wait has a time limit.
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

// Returns whether NCCL computes a reduction as the host does, except for the order of the ranks and
// the rounding. The minimum and maximum of floating types differ, because NCCL would drop a NaN. A
// mean of integers is not supported.
bool NcclSupports(DType type, ReduceOp op);

// Only one thread at a time may submit work. Other threads may call `Poll` and `Abort` meanwhile.
class NcclGroup {
 public:
  struct Setup {
    const Gpu* gpu;     // used only by this rank
    nccl::UniqueId id;  // the same on all ranks
    int rank;
    int size;
    // The time limit for all ranks to join, and for each call to finish.
    double timeout_seconds = 600;
    // The time limit for pending work when the group is destroyed.
    double closing_seconds = 10;
    // May end the waits for ranks and for calls early. The group is then aborted.
    Guard* guard = nullptr;
  };
  // Returns the identifier of a new group. One rank calls this function, and all ranks use the
  // result for one group.
  static nccl::UniqueId NewId();

  // Joins the group. Throws Error(kUnavailable) if not all ranks join in time.
  explicit NcclGroup(const Setup& setup);
  // Waits for pending work, but not longer than the time limit.
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  // `count` is a number of elements. For an all-reduce, it is the size of the whole data; for a
  // reduce-scatter and an all-gather, it is the size of one rank's part. `in` and `out` may be
  // equal. In a reduce-scatter or an all-gather, the smaller memory may also be this rank's part of
  // the larger memory.
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

  // Allocates GPU memory. NCCL can read and write this memory without copies after all ranks
  // together have registered it. Returns 0 if NCCL cannot allocate it. The memory must be freed
  // before the group ends.
  cuda::Address Allocate(size_t bytes);
  void Register(cuda::Address memory, size_t bytes);
  void Free(cuda::Address memory) noexcept;

  // Launches all calls in `body` together. This is required for messages to and from several ranks,
  // and for calls for several ranks of one process. If `body` throws an exception, the groups are
  // aborted, because other ranks may wait for the missing calls.
  static void Grouped(const std::vector<NcclGroup*>& groups, const std::function<void()>& body);
  void Grouped(const std::function<void()>& body) { Grouped({this}, body); }

  // Throws Error if NCCL has reported a failure, or if the group has been aborted.
  void Poll();
  // Ends pending work on this rank, and eventually on the other ranks. All later calls throw
  // Error(kUnavailable). If another thread is in a call of NCCL, first waits until this call
  // returns.
  void Abort() noexcept;

 private:
  void Launch(const char* function, const std::function<nccl::Result(nccl::Comm*)>& call);
  void Settle(const char* function);
  void CheckGuard();
  nccl::Result State();
  nccl::Comm* Living() const;

  const Setup setup_;
  const nccl::Library& nccl_;
  // Locked from the beginning to the end of a group of calls.
  std::recursive_mutex mutex_;
  nccl::Comm* comm_ = nullptr;  // null after an abort
  bool grouping_ = false;
  nccl::Window* window_ = nullptr;  // registration of the allocated memory
  void* handle_ = nullptr;          // the same, in older versions of NCCL
};

}  // namespace tfdist
