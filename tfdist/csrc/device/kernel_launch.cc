#include "device/kernel_launch.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "control/activity.h"
#include "device/fusion.h"
#include "device/gpu.h"
#include "device/kernels/names.h"
#include "device/stream_waits.h"
#include "error.h"

namespace tfdist {

std::vector<const char*> KernelNames() {
  std::vector<const char*> names = AllReduceKernelNames();
  for (const auto& more : {CodecKernelNames(), SelectKernelNames(), ScatterKernelNames()}) {
    names.insert(names.end(), more.begin(), more.end());
  }
  return names;
}

namespace {

using device::List;

// The maximum timeout of a kernel. The kernels count nanoseconds in a word of 64 bits, so a much
// longer or infinite timeout would overflow.
constexpr double kMaxSeconds = 1e9;
// If streams wait, at most 2 * kListsOfRoom lists are pending, and each list needs two barriers.
// The number of pending barriers must be smaller than `StreamBarriers::kMax`, because only this
// many barriers have words of their own. The barriers must also fit into the driver's queue. If the
// queue were full, a launch would block, and neither an abort nor a timeout could end this wait.
constexpr size_t kListsOfRoom = 4;
static_assert(2 * 2 * kListsOfRoom < StreamBarriers::kMax);

std::string Suffix(DType type, ReduceOp op) {
  if (type != DType::kBool) return std::string(NameOf(type)) + "_" + NameOf(op);
  const bool any = op == ReduceOp::kSum || op == ReduceOp::kMax;
  return any ? "uint8_max" : "uint8_min";
}

}  // namespace

std::vector<const char*> AllReduceKernelNames() {
#define TFDIST_NAMES(name, T, Op, S) "tfdist_one_shot_" #name, "tfdist_reduce_" #name,
  return {TFDIST_FOR_ALL_REDUCTIONS(TFDIST_NAMES) "tfdist_pack", "tfdist_barrier", "tfdist_signal",
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
  waiting_.nanoseconds = static_cast<uint64_t>(std::min(setup_.timeout_seconds, kMaxSeconds) * 1e9);
  staging_.rank = barrier_.rank = setup_.rank;
  staging_.ranks = barrier_.ranks = static_cast<uint32_t>(setup_.ranks.size());
  for (size_t rank = 0; rank < setup_.ranks.size(); ++rank) {
    barrier_.words[rank] = cuda::PointerTo<uint64_t>(setup_.ranks[rank].words);
  }
}

void KernelAllReduce::Launch(const std::vector<Tensor>& tensors, DType type, ReduceOp op,
                             cuda::Stream* stream, Guard& guard) {
  const uint64_t most = setup_.buffer_bytes / device::kVectorBytes;
  List list{};
  const auto flush = [&] {
    if (list.vectors > 0 && setup_.stream_barriers) AwaitRoom(stream, guard);
    if (list.vectors > 0) LaunchList(list, type, op, stream);
    list = {};
  };
  for (const Tensor& tensor : tensors) {
    for (size_t done = 0; done < tensor.bytes;) {
      if (list.count == List::kMax || list.vectors == most) flush();
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
  // If an earlier wait has failed, the other ranks may not signal any more, so do not queue another
  // wait.
  if (setup_.stream_barriers && outcome() != device::Outcome::kRunning) return;
  for (size_t rank = 0; rank < setup_.ranks.size(); ++rank) {
    staging_.of[rank] =
        cuda::PointerTo<char>(setup_.ranks[rank].staging) + turn_ * setup_.buffer_bytes;
  }
  turn_ = 1 - turn_;
  const KernelModule& kernels = *setup_.kernels;
  const double divisor = op == ReduceOp::kMean ? static_cast<double>(staging_.ranks) : 1.0;
  if (!setup_.stream_barriers && list.vectors * device::kVectorBytes <= setup_.one_shot_bytes) {
    const unsigned blocks = BlocksFor(list.vectors, device::kMaxBlocks);
    ++barrier_.number;
    kernels.Launch("tfdist_one_shot_" + Suffix(type, op), blocks, kKernelThreads, stream, list,
                   staging_, barrier_, waiting_, divisor);
    return;
  }
  const unsigned blocks = BlocksFor(list.vectors, kMaxBlocksAlone);
  staging_.part = (list.vectors + staging_.ranks - 1) / staging_.ranks;
  kernels.Launch("tfdist_pack", blocks, kKernelThreads, stream, list, staging_, waiting_);
  SyncRanks(stream);
  kernels.Launch("tfdist_reduce_" + Suffix(type, op), blocks, kKernelThreads, stream, list.vectors,
                 staging_, waiting_, divisor);
  SyncRanks(stream);
  kernels.Launch("tfdist_unpack", blocks, kKernelThreads, stream, list, staging_, waiting_);
}

void KernelAllReduce::SyncRanks(cuda::Stream* stream) {
  ++barrier_.number;
  const KernelModule& kernels = *setup_.kernels;
  if (!setup_.stream_barriers) {
    kernels.Launch("tfdist_barrier", 1, device::kMaxRanks, stream, barrier_, waiting_);
    return;
  }
  for (uint32_t rank = 0; rank < barrier_.ranks; ++rank) {
    barrier_.words[rank] = setup_.stream_barriers->WordsOf(rank, barrier_.number);
  }
  kernels.Launch("tfdist_signal", 1, device::kMaxRanks, stream, barrier_, waiting_);
  setup_.stream_barriers->Await(barrier_.number, stream);
  // Copy the abort flag of the host to `ended_`, so that the later kernels in the stream return
  // without any effect if the wait has been aborted.
  const cuda::Result result =
      cuda::Load().cuMemcpyAsync(ended_.address(), host_.address(), sizeof(uint64_t), stream);
  cuda::Check(result, "cuMemcpyAsync");
}

void KernelAllReduce::AwaitRoom(cuda::Stream* stream, Guard& guard) {
  if (launches_++ % kListsOfRoom != 0) return;
  const int64_t begin = Nanoseconds();
  Await(room_, guard, [&] {
    if (static_cast<double>(Nanoseconds() - begin) < setup_.timeout_seconds * 1e9) return;
    throw Error(Code::kUnavailable,
                "The GPUs did not finish all-reduces that all of them had begun within "
                "TFDIST_COLLECTIVE_TIMEOUT.");
  });
  room_.Record(stream);
}

void KernelAllReduce::Abort() noexcept {
  __atomic_store_n(static_cast<uint64_t*>(host_.data()), uint64_t{1}, __ATOMIC_RELEASE);
  if (setup_.stream_barriers) return setup_.stream_barriers->Release();
  setup_.gpu->UseIfPossible();
  cuda::Load().cuMemsetD32Async(ended_.address(), 1, 1, aside_.get());
}

device::Outcome KernelAllReduce::outcome() const {
  const auto* const words = static_cast<const uint64_t*>(host_.data());
  const auto found = static_cast<device::Outcome>(__atomic_load_n(words + 1, __ATOMIC_ACQUIRE));
  if (found != device::Outcome::kRunning) return found;
  return __atomic_load_n(words, __ATOMIC_ACQUIRE) ? device::Outcome::kAborted : found;
}

namespace {

// The number of threads in a block of a kernel. It is small, so that a batch has enough blocks for
// all multiprocessors of the GPU.
constexpr unsigned kThreads = 128;
// The number of threads that handle one block of encoded values together.
constexpr unsigned kThreadsOfBlock = 16;
constexpr size_t kMaxBlocks = 4096;

std::string NameOf(const Codec& codec) {
  switch (codec.encoding) {
    case Encoding::kHalf:
      return "half";
    case Encoding::kBfloat16:
      return "bfloat16";
    case Encoding::kFloat8:
      return "float8";
    case Encoding::kLevels:
      return "levels" + std::to_string(codec.bits);
    case Encoding::kPowers:
      return "powers";
    case Encoding::kTwoMeans:
      return "means";
    case Encoding::kSigns:
      return "signs";
  }
  return "";
}

device::Room RoomAt(cuda::Address room, size_t count) {
  return {cuda::PointerTo<float>(room), count};
}

}  // namespace

std::vector<const char*> CodecKernelNames() {
#define TFDIST_NAMES(name, F) "tfdist_encode_" #name, "tfdist_decode_" #name, "tfdist_sum_" #name,
  return {TFDIST_FOR_ALL_ENCODINGS(TFDIST_NAMES) "tfdist_sum_votes"};
#undef TFDIST_NAMES
}

template <typename... Arguments>
void KernelCodec::Launch(const std::string& name, size_t count, uint32_t block,
                         Arguments... arguments) const {
  if (count == 0) return;
  const size_t threads = (count + block - 1) / block * kThreadsOfBlock;
  const size_t blocks = std::min((threads + kThreads - 1) / kThreads, kMaxBlocks);
  kernels_.Launch(name, static_cast<unsigned>(blocks), kThreads, stream_, arguments...);
}

void KernelCodec::Encode(const device::Batch& batch, const device::Place& in,
                         const device::Place& error, cuda::Address room, cuda::Address to) const {
  Launch("tfdist_encode_" + NameOf(batch.codec), batch.count, batch.codec.block, batch, in, error,
         RoomAt(room, batch.count), cuda::PointerTo<uint8_t>(to));
}

void KernelCodec::Decode(const Codec& codec, size_t count, cuda::Address from,
                         const device::Place& out, cuda::Address room) const {
  const uint8_t* const encoded = cuda::PointerTo<uint8_t>(from);
  Launch("tfdist_decode_" + NameOf(codec), count, codec.block, codec, uint64_t{count}, encoded, out,
         RoomAt(room, count));
}

void KernelCodec::Sum(const device::Batch& batch, const device::Arrived& arrived, bool votes,
                      const device::Place& in, const device::Place& error, const device::Place& out,
                      cuda::Address room, cuda::Address to) const {
  Launch("tfdist_sum_" + (votes ? "votes" : NameOf(arrived.codec)), batch.count, batch.codec.block,
         batch, arrived, in, error, out, RoomAt(room, batch.count), cuda::PointerTo<uint8_t>(to));
}

namespace {

constexpr size_t kWord = sizeof(uint32_t);

std::vector<device::Target> TargetsOf(const std::vector<RowSums>& tensors) {
  std::vector<device::Target> targets;
  for (const RowSums& tensor : tensors) {
    targets.push_back({tensor.values, static_cast<uint32_t>(tensor.count), 0, 0});
  }
  return targets;
}

}  // namespace

std::vector<const char*> ScatterKernelNames() {
#define TFDIST_NAMES(name) "tfdist_" #name,
  return {TFDIST_FOR_SCATTER_KERNELS(TFDIST_NAMES)};
#undef TFDIST_NAMES
}

size_t KernelScatter::ScratchBytes() const { return (2 * ranks_ + 3) * kWord; }

void KernelScatter::Sum(const Row* rows, size_t count, const std::vector<RowSums>& tensors,
                        cuda::Address scratch) const {
  size_t values = 0;
  for (const RowSums& tensor : tensors) values += tensor.count;
  auto* const words = cuda::PointerTo<uint32_t>(scratch);
  const device::RowRuns runs{static_cast<uint32_t>(ranks_), words, words + 1, words + 2,
                             words + 2 + ranks_};
  const auto some = static_cast<uint32_t>(count);
  gpu_.Use();
  cuda::Check(cuda::Load().cuMemsetD32Async(scratch, 0, 2, stream_), "cuMemsetD32Async");
  if (some > 0) {
    kernels_.Launch("tfdist_scatter_find", BlocksFor(some, kMaxBlocksAlone), kKernelThreads,
                    stream_, rows, some, static_cast<uint32_t>(values), runs);
  }
  kernels_.Launch("tfdist_scatter_order", 1, kKernelThreads, stream_, some, runs);
  for (const device::Targets& list : Tiled(TargetsOf(tensors))) {
    if (list.tiles == 0) continue;
    kernels_.Launch("tfdist_scatter_sum", BlocksForHalfWarps(list.tiles), kKernelThreads, stream_,
                    list, rows, runs);
  }
}

namespace {

using device::Source;

constexpr size_t kWordsOfTensor = 4, kWordsOfTally = sizeof(device::Tally) / kWord;

// Returns the number of tensors in the longest list, if `tensors` tensors are divided into lists.
size_t Listed(size_t tensors) { return std::min<size_t>(tensors, device::Sources::kMax); }

std::vector<Source> SourcesOf(const std::vector<Candidates>& all) {
  std::vector<Source> sources;
  for (const Candidates& c : all) {
    sources.push_back(
        {c.in, c.error, c.momentum, static_cast<uint32_t>(c.count), c.scale, c.factor, 0, 0, 0});
  }
  return sources;
}

}  // namespace

std::vector<const char*> SelectKernelNames() {
#define TFDIST_NAMES(name) "tfdist_" #name,
  return {TFDIST_FOR_SELECT_KERNELS(TFDIST_NAMES)};
#undef TFDIST_NAMES
}

KernelSelect::KernelSelect(const Gpu& gpu, const KernelModule& kernels, cuda::Stream* stream,
                           const std::vector<Candidates>& all)
    : gpu_(gpu),
      kernels_(kernels),
      stream_(stream),
      lists_(Tiled(SourcesOf(all))),
      tensors_(static_cast<uint32_t>(all.size())) {
  for (const device::Sources& list : lists_) tiles_ += list.tiles;
  for (const Candidates& candidates : all) keeps_ = keeps_ || candidates.error;
}

size_t KernelSelect::ScratchBytes() const {
  const size_t counts = Listed(tensors_) * device::kDigitValues;
  return (kWordsOfTensor * tensors_ + 1 + counts + kWordsOfTally * tiles_) * kWord;
}

void KernelSelect::FindLargest(const std::vector<size_t>& selected, cuda::Address scratch) {
  for (device::Sources& list : lists_) {
    for (uint32_t k = 0; k < list.count; ++k) {
      Source& source = list.tensors[k];
      source.selected =
          static_cast<uint32_t>(std::min<size_t>(selected[list.number + k], source.count));
    }
  }
  Begin(0, scratch);
  for (const device::Sources& list : lists_) {
    bool accumulates = true;
    for (const device::Digit& digit : device::kDigits) {
      Launch("tfdist_select_digits", list.tiles, list, digit, accumulates, cuts_);
      Launch("tfdist_select_narrow", list.count, list, digit, cuts_);
      accumulates = false;
    }
  }
  Count(false);
}

void KernelSelect::FindAbove(float threshold, cuda::Address scratch) {
  CheckThreshold(threshold);
  uint32_t magnitude = 0;
  std::memcpy(&magnitude, &threshold, sizeof(magnitude));
  Begin(magnitude - 1, scratch);
  Count(true);
}

void KernelSelect::Take(Row* rows) {
  for (const device::Sources& list : lists_) {
    Launch("tfdist_select_take", list.tiles, list, cuts_, rows);
    if (keeps_) Launch("tfdist_select_forget", list.tiles, list, cuts_);
  }
}

// Divides the scratch memory, and initializes it.
// Args: magnitude: the initial value of the cut of each tensor.
void KernelSelect::Begin(uint32_t magnitude, cuda::Address scratch) {
  auto* next = cuda::PointerTo<uint32_t>(scratch);
  const auto take = [&next](size_t words) {
    uint32_t* const taken = next;
    next += words;
    return taken;
  };
  // The tallies are at the beginning of the memory, because they must be aligned to two words.
  cuts_.tallies = reinterpret_cast<device::Tally*>(take(kWordsOfTally * tiles_));
  cuts_.magnitudes = take(tensors_);
  cuts_.equals = take(tensors_);
  cuts_.rows = take(tensors_);
  cuts_.not_finite = take(tensors_);
  cuts_.all_rows = take(1);
  cuts_.digits = take(Listed(tensors_) * device::kDigitValues);
  Fill(cuts_.magnitudes, magnitude, tensors_);
  Fill(cuts_.equals, 0, static_cast<size_t>(next - cuts_.equals));
}

void KernelSelect::Fill(const void* from, uint32_t value, size_t words) const {
  gpu_.Use();
  cuda::Check(cuda::Load().cuMemsetD32Async(cuda::AddressOf(from), value, words, stream_),
              "cuMemsetD32Async");
}

void KernelSelect::Count(bool accumulates) {
  for (const device::Sources& list : lists_) {
    Launch("tfdist_select_count", list.tiles, list, accumulates, cuts_);
    kernels_.Launch("tfdist_select_place", list.count, kKernelThreads, stream_, list, cuts_);
  }
  kernels_.Launch("tfdist_select_sum", 1, device::kHalfWarp, stream_, tensors_, cuts_);
}

template <typename... Arguments>
void KernelSelect::Launch(const char* name, uint64_t half_warps, Arguments... arguments) const {
  if (half_warps == 0) return;
  kernels_.Launch(name, BlocksForHalfWarps(half_warps), kKernelThreads, stream_, arguments...);
}

}  // namespace tfdist
