#include "device/nccl_group.h"

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <thread>
#include <utility>

#include "error.h"
#include "reduce/reduce.h"

namespace tfdist {
namespace {

using nccl::Comm;
using nccl::Result;
using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// How long a wait yields the CPU between two polls before it begins to sleep between them. Most
// calls of NCCL finish immediately, or within the time that NCCL needs to start a thread. For these
// calls, even a short sleep would be a noticeable delay.
constexpr auto kImpatient = std::chrono::microseconds(200);
constexpr auto kNap = std::chrono::microseconds(500);

void Pause(Clock::time_point since) {
  if (Clock::now() - since < kImpatient) return std::this_thread::yield();
  std::this_thread::sleep_for(kNap);
}

std::string Rounded(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), seconds < 10 ? "%.1f s" : "%.0f s", seconds);
  return text;
}

std::string Numbered(int rank, int size) {
  return "rank " + std::to_string(rank) + " of " + std::to_string(size);
}

void* Pointer(cuda::Address address) { return cuda::PointerTo<void>(address); }

nccl::Type TypeOf(DType type) {
  switch (type) {
    case DType::kBool:
    case DType::kUint8:
      return nccl::kUint8;
    case DType::kInt8:
      return nccl::kInt8;
    case DType::kInt32:
      return nccl::kInt32;
    case DType::kInt64:
      return nccl::kInt64;
    case DType::kFloat16:
      return nccl::kFloat16;
    case DType::kBfloat16:
      return nccl::kBfloat16;
    case DType::kFloat32:
      return nccl::kFloat32;
    case DType::kFloat64:
      return nccl::kFloat64;
  }
  return nccl::kUint8;
}

// NCCL has no bools. The sum of bools is their logical OR, which is the maximum of their bytes. The
// product of bools is their logical AND, which is the minimum of their bytes.
nccl::Op OpOf(DType type, ReduceOp op) {
  CheckReducible(type, op);
  if (!NcclSupports(type, op)) {
    throw Error(Code::kInvalidArgument, std::string("NCCL loses NaNs in the ") + NameOf(op) +
                                            " of " + NameOf(type) + ": reduce without it.");
  }
  const bool logical = type == DType::kBool;
  switch (op) {
    case ReduceOp::kSum:
      return logical ? nccl::kMax : nccl::kSum;
    case ReduceOp::kMean:
      return nccl::kMean;
    case ReduceOp::kMin:
      return nccl::kMin;
    case ReduceOp::kMax:
      return nccl::kMax;
    case ReduceOp::kProduct:
      return logical ? nccl::kMin : nccl::kProduct;
  }
  return nccl::kSum;
}

}  // namespace

bool NcclSupports(DType type, ReduceOp op) {
  if (op == ReduceOp::kMean) return IsFloating(type);
  return !IsFloating(type) || (op != ReduceOp::kMin && op != ReduceOp::kMax);
}

nccl::UniqueId NcclGroup::NewId() {
  nccl::UniqueId id;
  nccl::Check(nccl::Load().ncclGetUniqueId(&id), "ncclGetUniqueId");
  return id;
}

NcclGroup::NcclGroup(const Setup& setup) : setup_(setup), nccl_(nccl::Load()) {
  setup_.gpu->Use();
  nccl::Config config;
  config.blocking = 0;
  try {
    const Result result =
        nccl_.ncclCommInitRankConfig(&comm_, setup_.size, setup_.id, setup_.rank, &config);
    if (result != nccl::kInProgress) nccl::Check(result, "ncclCommInitRankConfig");
    Settle("ncclCommInitRankConfig");
  } catch (...) {
    Abort();
    throw;
  }
}

NcclGroup::~NcclGroup() {
  if (!comm_) return;
  setup_.gpu->UseIfPossible();
  const auto begin = Clock::now();
  Result result = nccl_.ncclCommFinalize(comm_);
  while (result == nccl::kInProgress && Clock::now() - begin < Seconds(setup_.closing_seconds)) {
    Pause(begin);
    const Result asked = nccl_.ncclCommGetAsyncError(comm_, &result);
    if (asked != nccl::kSuccess) result = asked;
  }
  if (result == nccl::kSuccess) {
    nccl_.ncclCommDestroy(comm_);
  } else {
    Abort();
  }
}

void NcclGroup::AllReduce(cuda::Address in, cuda::Address out, size_t count, DType type,
                          ReduceOp op, cuda::Stream* stream) {
  const nccl::Op reduction = OpOf(type, op);
  Launch("ncclAllReduce", [&](Comm* comm) {
    return nccl_.ncclAllReduce(Pointer(in), Pointer(out), count, TypeOf(type), reduction, comm,
                               stream);
  });
}

void NcclGroup::ReduceScatter(cuda::Address in, cuda::Address out, size_t count, DType type,
                              ReduceOp op, cuda::Stream* stream) {
  const nccl::Op reduction = OpOf(type, op);
  Launch("ncclReduceScatter", [&](Comm* comm) {
    return nccl_.ncclReduceScatter(Pointer(in), Pointer(out), count, TypeOf(type), reduction, comm,
                                   stream);
  });
}

void NcclGroup::AllGather(cuda::Address in, cuda::Address out, size_t count, DType type,
                          cuda::Stream* stream) {
  Launch("ncclAllGather", [&](Comm* comm) {
    return nccl_.ncclAllGather(Pointer(in), Pointer(out), count, TypeOf(type), comm, stream);
  });
}

void NcclGroup::Broadcast(cuda::Address in, cuda::Address out, size_t count, DType type, int root,
                          cuda::Stream* stream) {
  Launch("ncclBroadcast", [&](Comm* comm) {
    return nccl_.ncclBroadcast(Pointer(in), Pointer(out), count, TypeOf(type), root, comm, stream);
  });
}

void NcclGroup::Send(cuda::Address in, size_t count, DType type, int to, cuda::Stream* stream) {
  Launch("ncclSend", [&](Comm* comm) {
    return nccl_.ncclSend(Pointer(in), count, TypeOf(type), to, comm, stream);
  });
}

void NcclGroup::Recv(cuda::Address out, size_t count, DType type, int from, cuda::Stream* stream) {
  Launch("ncclRecv", [&](Comm* comm) {
    return nccl_.ncclRecv(Pointer(out), count, TypeOf(type), from, comm, stream);
  });
}

cuda::Address NcclGroup::Allocate(size_t bytes) {
  setup_.gpu->Use();
  void* memory = nullptr;
  if (!nccl_.ncclMemAlloc || !nccl_.ncclMemFree ||
      nccl_.ncclMemAlloc(&memory, bytes) != nccl::kSuccess) {
    return 0;
  }
  return cuda::AddressOf(memory);
}

// If the memory cannot be registered, NCCL can still use it, but with additional copies.
void NcclGroup::Register(cuda::Address memory, size_t bytes) {
  setup_.gpu->Use();
  if (nccl_.ncclCommWindowRegister) {
    nccl_.ncclCommWindowRegister(Living(), Pointer(memory), bytes, &window_, nccl::kSymmetric);
    Settle("ncclCommWindowRegister");
  } else if (nccl_.ncclCommRegister) {
    nccl_.ncclCommRegister(Living(), Pointer(memory), bytes, &handle_);
  }
}

void NcclGroup::Free(cuda::Address memory) noexcept {
  setup_.gpu->UseIfPossible();
  if (comm_ && window_) nccl_.ncclCommWindowDeregister(comm_, window_);
  if (comm_ && handle_) nccl_.ncclCommDeregister(comm_, handle_);
  window_ = nullptr;
  handle_ = nullptr;
  nccl_.ncclMemFree(Pointer(memory));
}

void NcclGroup::Grouped(const std::vector<NcclGroup*>& groups, const std::function<void()>& body) {
  {
    std::vector<std::unique_lock<std::recursive_mutex>> locks;
    for (NcclGroup* group : groups) locks.emplace_back(group->mutex_);
    const nccl::Library& nccl = groups[0]->nccl_;
    if (groups[0]->grouping_) return body();
    for (NcclGroup* group : groups) group->Living();
    const auto mark = [&groups](bool grouping) {
      for (NcclGroup* group : groups) group->grouping_ = grouping;
    };
    groups[0]->setup_.gpu->Use();
    nccl::Check(nccl.ncclGroupStart(), "ncclGroupStart");
    mark(true);
    try {
      body();
    } catch (...) {
      mark(false);
      nccl.ncclGroupEnd();
      for (NcclGroup* group : groups) group->Abort();
      throw;
    }
    mark(false);
    const Result result = nccl.ncclGroupEnd();
    if (result != nccl::kInProgress) nccl::Check(result, "ncclGroupEnd");
  }
  for (NcclGroup* group : groups) group->Settle("ncclGroupEnd");
}

void NcclGroup::Launch(const char* function, const std::function<Result(Comm*)>& call) {
  {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    setup_.gpu->Use();
    const Result result = call(Living());
    if (result != nccl::kInProgress) nccl::Check(result, function);
    if (grouping_) return;
  }
  Settle(function);
}

// Waits until the last NCCL call has finished. This function polls the state of the communicator,
// because some versions of NCCL return success while a call is still in progress.
//
// In NCCL up to 2.26, a call leaves thread-local data behind, and only the next NCCL call of the
// same thread removes them. This function therefore calls ncclCommCount, which has no other effect.
void NcclGroup::Settle(const char* function) {
  const auto begin = Clock::now();
  Result state;
  while ((state = State()) == nccl::kInProgress) {
    CheckGuard();
    if (Clock::now() - begin >= Seconds(setup_.timeout_seconds)) {
      Abort();
      throw Error(Code::kUnavailable, std::string(function) + " of NCCL has been in progress on " +
                                          Numbered(setup_.rank, setup_.size) + " for " +
                                          Rounded(setup_.timeout_seconds) +
                                          ": other ranks have not joined, or cannot be reached. "
                                          "NCCL_DEBUG=INFO shows what NCCL does.");
    }
    Pause(begin);
  }
  nccl::Check(state, function);
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  int count = 0;
  nccl::Check(nccl_.ncclCommCount(Living(), &count), function);
}

void NcclGroup::CheckGuard() {
  try {
    if (setup_.guard) setup_.guard->Check();
  } catch (...) {
    Abort();
    throw;
  }
}

void NcclGroup::Poll() {
  const Result state = State();
  if (state != nccl::kInProgress) nccl::Check(state, "The communicator");
}

void NcclGroup::Abort() noexcept {
  Comm* comm = nullptr;
  {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    std::swap(comm, comm_);
  }
  if (!comm) return;
  setup_.gpu->UseIfPossible();
  nccl_.ncclCommAbort(comm);
}

Result NcclGroup::State() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  Result state = nccl::kSuccess;
  nccl::Check(nccl_.ncclCommGetAsyncError(Living(), &state), "ncclCommGetAsyncError");
  return state;
}

Comm* NcclGroup::Living() const {
  if (comm_) return comm_;
  throw Error(Code::kUnavailable, "The NCCL communicator of " + Numbered(setup_.rank, setup_.size) +
                                      " has been aborted.");
}

}  // namespace tfdist
