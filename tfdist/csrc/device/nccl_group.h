// One rank of a communicator of NCCL. Its calls return once the work is in a stream, and none of
// them waits for ever.
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

// Whether NCCL reduces as the host does, but for the order of the ranks and where it rounds: not a
// minimum or maximum of floating types, which would drop a NaN, nor a mean of integers.
bool NcclSupports(DType type, ReduceOp op);

// Work is given by one thread at a time. `Poll` and `Abort` may be called by any other meanwhile.
class NcclGroup {
 public:
  struct Setup {
    const Gpu* gpu;     // of this rank alone
    nccl::UniqueId id;  // the same on all ranks
    int rank;
    int size;
    double timeout_seconds = 600;  // for all ranks to join, and for each call to be done with
    double closing_seconds = 10;   // for what is under way at the end
    Guard* guard = nullptr;        // may end these waits, and with them the group
  };
  // Made by one rank, for a single group.
  static nccl::UniqueId NewId();

  // Joins the others. Throws Error(kUnavailable) if not all of them come in time.
  explicit NcclGroup(const Setup& setup);
  // Waits for the work under way, a bounded time.
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  // Counts are of elements: of the whole for an all-reduce, of one rank's part for a reduce-scatter
  // and an all-gather. `in` may be `out`, or where the rank's part lies in the other.
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

  // Memory on the GPU that NCCL can read and write without copies of its own, once all ranks
  // together have registered it; 0 where NCCL has none to give. It must be freed before the group
  // goes.
  cuda::Address Allocate(size_t bytes);
  void Register(cuda::Address memory, size_t bytes);
  void Free(cuda::Address memory) noexcept;

  // Launches what `body` calls of these groups as one: messages to and from several ranks must be,
  // and what several ranks of one process do together. If it throws, the groups are aborted, since
  // others may wait for the rest.
  static void Grouped(const std::vector<NcclGroup*>& groups, const std::function<void()>& body);
  void Grouped(const std::function<void()>& body) { Grouped({this}, body); }

  // Throws Error if NCCL has found a fault since, or the group was aborted.
  void Poll();
  // Ends what is under way, here and in time on the other ranks; all later calls throw
  // Error(kUnavailable). First lets a call of NCCL that another thread is in return.
  void Abort() noexcept;

 private:
  void Launch(const char* function, const std::function<nccl::Result(nccl::Comm*)>& call);
  void Settle(const char* function);
  void CheckGuard();
  nccl::Result State();
  nccl::Comm* Living() const;

  const Setup setup_;
  const nccl::Library& nccl_;
  // A group of calls holds it from the beginning to the end.
  std::recursive_mutex mutex_;
  nccl::Comm* comm_ = nullptr;  // null once aborted
  bool grouping_ = false;
  nccl::Window* window_ = nullptr;  // of the memory that was allocated
  void* handle_ = nullptr;          // the same with an older version
};

}  // namespace tfdist
