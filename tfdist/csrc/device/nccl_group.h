// One rank of an NCCL communicator. Calls return once their work is queued in a stream, and every
// wait has a time limit.
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

// Whether NCCL reduces like the host, except for the order of the ranks and the rounding. It does
// not for a minimum or maximum of floating types, which would drop a NaN, or for a mean of
// integers.
bool NcclSupports(DType type, ReduceOp op);

// One thread at a time may submit work. Any other thread may call `Poll` and `Abort` meanwhile.
class NcclGroup {
 public:
  struct Setup {
    const Gpu* gpu;     // used by this rank only
    nccl::UniqueId id;  // the same on all ranks
    int rank;
    int size;
    double timeout_seconds = 600;  // for all ranks to join, and for each call to finish
    double closing_seconds = 10;   // for pending work at the end
    Guard* guard = nullptr;        // may end these waits, and with them the group
  };
  // Created by one rank, for a single group.
  static nccl::UniqueId NewId();

  // Joins the other ranks. Throws Error(kUnavailable) if not all of them join in time.
  explicit NcclGroup(const Setup& setup);
  // Waits for pending work, for a limited time.
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  // Counts are in elements: of the whole for an all-reduce, of one rank's part for a reduce-scatter
  // and an all-gather. `in` may equal `out`, or be the rank's part of the larger memory.
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

  // GPU memory that NCCL can read and write without copies, once all ranks together have registered
  // it; 0 if NCCL cannot allocate it. It must be freed before the group ends.
  cuda::Address Allocate(size_t bytes);
  void Register(cuda::Address memory, size_t bytes);
  void Free(cuda::Address memory) noexcept;

  // Launches the groups' calls in `body` as one. Messages to and from several ranks require this,
  // and so do calls for several ranks of a process. If `body` throws, the groups are aborted, since
  // other ranks may wait for the missing calls.
  static void Grouped(const std::vector<NcclGroup*>& groups, const std::function<void()>& body);
  void Grouped(const std::function<void()>& body) { Grouped({this}, body); }

  // Throws Error if NCCL has reported a failure, or the group was aborted.
  void Poll();
  // Ends pending work, here and eventually on the other ranks; all later calls throw
  // Error(kUnavailable). First waits for another thread's current NCCL call to return.
  void Abort() noexcept;

 private:
  void Launch(const char* function, const std::function<nccl::Result(nccl::Comm*)>& call);
  void Settle(const char* function);
  void CheckGuard();
  nccl::Result State();
  nccl::Comm* Living() const;

  const Setup setup_;
  const nccl::Library& nccl_;
  // Held from the beginning to the end of a group of calls.
  std::recursive_mutex mutex_;
  nccl::Comm* comm_ = nullptr;  // null once aborted
  bool grouping_ = false;
  nccl::Window* window_ = nullptr;  // of the allocated memory
  void* handle_ = nullptr;          // likewise, in older versions
};

}  // namespace tfdist
