#include "device/kernel_all_reduce.h"

#include <algorithm>
#include <string>

#include "control/activity.h"
#include "device/awaiting.h"
#include "device/grid.h"
#include "device/kernels/names.h"
#include "error.h"

namespace tfdist {
namespace {

using device::List;

// A longer timeout, such as an infinite one, would not fit the kernels' clock.
constexpr double kLongestSeconds = 1e9;
// Where streams wait, at most twice as many lists are under way. Each takes two meetings, and all of
// them less than a driver's queue holds: to launch more would wait as well, and nothing could end that.
constexpr size_t kListsOfRoom = 4;
static_assert(2 * 2 * kListsOfRoom < StreamMeetings::kMost);

std::string Suffix(DType type, ReduceOp op) {
  if (type != DType::kBool) return std::string(NameOf(type)) + "_" + NameOf(op);
  const bool any = op == ReduceOp::kSum || op == ReduceOp::kMax;
  return any ? "uint8_max" : "uint8_min";
}

}  // namespace

std::vector<const char*> AllReduceKernelNames() {
#define TFDIST_NAMES(name, T, Op, S) "tfdist_one_shot_" #name, "tfdist_reduce_" #name,
  return {TFDIST_FOR_ALL_REDUCTIONS(TFDIST_NAMES) "tfdist_pack", "tfdist_meet", "tfdist_tell",
          "tfdist_unpack"};
#undef TFDIST_NAMES
}

KernelAllReduce::KernelAllReduce(Setup setup)
    : setup_(std::move(setup)),
      host_(*setup_.gpu, 2 * sizeof(uint64_t)),
      ended_(*setup_.gpu, sizeof(uint64_t)),
      aside_(*setup_.gpu),
      room_(*setup_.gpu) {
  waiting_.abort = cuda::PointerTo<uint64_t>(host_.address());
  waiting_.outcome = cuda::PointerTo<uint64_t>(host_.address()) + 1;
  waiting_.ended = cuda::PointerTo<uint64_t>(ended_.address());
  waiting_.nanoseconds =
      static_cast<uint64_t>(std::min(setup_.timeout_seconds, kLongestSeconds) * 1e9);
  staging_.rank = meeting_.rank = setup_.rank;
  staging_.ranks = meeting_.ranks = static_cast<uint32_t>(setup_.ranks.size());
  for (size_t rank = 0; rank < setup_.ranks.size(); ++rank) {
    meeting_.words[rank] = cuda::PointerTo<uint64_t>(setup_.ranks[rank].words);
  }
}

void KernelAllReduce::Launch(const std::vector<Tensor>& tensors, DType type, ReduceOp op,
                             cuda::Stream* stream, Guard& guard) {
  const uint64_t most = setup_.buffer_bytes / device::kVectorBytes;
  List list{};
  const auto flush = [&] {
    if (list.vectors > 0 && setup_.meetings) AwaitRoom(stream, guard);
    if (list.vectors > 0) LaunchList(list, type, op, stream);
    list = {};
  };
  for (const Tensor& tensor : tensors) {
    for (size_t done = 0; done < tensor.bytes;) {
      if (list.count == List::kMost || list.vectors == most) flush();
      const size_t room = (most - list.vectors) * device::kVectorBytes;
      const size_t bytes = std::min(tensor.bytes - done, room);
      list.spans[list.count++] = {cuda::PointerTo<char>(tensor.in) + done,
                                  cuda::PointerTo<char>(tensor.out) + done, bytes, list.vectors};
      list.vectors += (bytes + device::kVectorBytes - 1) / device::kVectorBytes;
      done += bytes;
    }
  }
  flush();
}

void KernelAllReduce::LaunchList(const List& list, DType type, ReduceOp op, cuda::Stream* stream) {
  // Waits that have been ended are not begun again.
  if (setup_.meetings && outcome() != device::Outcome::kRunning) return;
  for (size_t rank = 0; rank < setup_.ranks.size(); ++rank) {
    staging_.of[rank] =
        cuda::PointerTo<char>(setup_.ranks[rank].staging) + turn_ * setup_.buffer_bytes;
  }
  turn_ = 1 - turn_;
  const KernelModule& kernels = *setup_.kernels;
  const double divisor = op == ReduceOp::kMean ? static_cast<double>(staging_.ranks) : 1.0;
  if (!setup_.meetings && list.vectors * device::kVectorBytes <= setup_.one_shot_bytes) {
    const unsigned blocks = BlocksFor(list.vectors, device::kMostBlocks);
    ++meeting_.number;
    kernels.Launch("tfdist_one_shot_" + Suffix(type, op), blocks, kKernelThreads, stream, list,
                   staging_, meeting_, waiting_, divisor);
    return;
  }
  const unsigned blocks = BlocksFor(list.vectors, kMostBlocksAlone);
  staging_.part = (list.vectors + staging_.ranks - 1) / staging_.ranks;
  kernels.Launch("tfdist_pack", blocks, kKernelThreads, stream, list, staging_, waiting_);
  Meet(stream);
  kernels.Launch("tfdist_reduce_" + Suffix(type, op), blocks, kKernelThreads, stream, list.vectors,
                 staging_, waiting_, divisor);
  Meet(stream);
  kernels.Launch("tfdist_unpack", blocks, kKernelThreads, stream, list, staging_, waiting_);
}

void KernelAllReduce::Meet(cuda::Stream* stream) {
  ++meeting_.number;
  const KernelModule& kernels = *setup_.kernels;
  if (!setup_.meetings) {
    kernels.Launch("tfdist_meet", 1, device::kMostRanks, stream, meeting_, waiting_);
    return;
  }
  for (uint32_t rank = 0; rank < meeting_.ranks; ++rank) {
    meeting_.words[rank] = setup_.meetings->WordsOf(rank, meeting_.number);
  }
  kernels.Launch("tfdist_tell", 1, device::kMostRanks, stream, meeting_, waiting_);
  setup_.meetings->Await(meeting_.number, stream);
  // What is behind sees whether the wait has been ended in vain.
  const cuda::Result result = cuda::Load().cuMemcpyAsync(ended_.address(), host_.address(),
                                                         sizeof(uint64_t), stream);
  cuda::Check(result, "cuMemcpyAsync");
}

void KernelAllReduce::AwaitRoom(cuda::Stream* stream, Guard& guard) {
  if (launches_++ % kListsOfRoom != 0) return;
  const int64_t begin = Nanoseconds();
  Await(room_, guard, [&] {
    if (static_cast<double>(Nanoseconds() - begin) < setup_.timeout_seconds * 1e9) return;
    throw Error(Code::kUnavailable, "The GPUs have not come to the end of all-reduces that all of "
                                    "them had begun, within the time that "
                                    "TFDIST_COLLECTIVE_TIMEOUT gives.");
  });
  room_.Record(stream);
}

void KernelAllReduce::Abort() noexcept {
  __atomic_store_n(static_cast<uint64_t*>(host_.data()), uint64_t{1}, __ATOMIC_RELEASE);
  if (setup_.meetings) return setup_.meetings->Release();
  setup_.gpu->UseIfPossible();
  cuda::Load().cuMemsetD32Async(ended_.address(), 1, 1, aside_.get());
}

device::Outcome KernelAllReduce::outcome() const {
  const auto* const words = static_cast<const uint64_t*>(host_.data());
  const auto found = static_cast<device::Outcome>(__atomic_load_n(words + 1, __ATOMIC_ACQUIRE));
  if (found != device::Outcome::kRunning) return found;
  return __atomic_load_n(words, __ATOMIC_ACQUIRE) ? device::Outcome::kAborted : found;
}

}  // namespace tfdist
