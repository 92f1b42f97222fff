#include "device/kernel_select.h"

#include <algorithm>
#include <cstring>

#include "device/tiling.h"

namespace tfdist {
namespace {

using device::Source;

constexpr size_t kWord = sizeof(uint32_t);
constexpr size_t kWordsOfTensor = 4, kWordsOfTally = sizeof(device::Tally) / kWord;

// How many tensors a list has.
size_t Listed(size_t tensors) { return std::min<size_t>(tensors, device::Sources::kMost); }

std::vector<Source> SourcesOf(const std::vector<Candidates>& all) {
  std::vector<Source> sources;
  for (const Candidates& c : all) {
    sources.push_back({c.in, c.error, c.momentum, static_cast<uint32_t>(c.count), c.scale, c.factor,
                       0, 0, 0});
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

// Args: magnitude: that of all cuts.
void KernelSelect::Begin(uint32_t magnitude, cuda::Address scratch) {
  auto* next = cuda::PointerTo<uint32_t>(scratch);
  const auto take = [&next](size_t words) {
    uint32_t* const taken = next;
    next += words;
    return taken;
  };
  // Tallies first: they are two words.
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
  kernels_.Launch("tfdist_select_sum", 1, device::kTeam, stream_, tensors_, cuts_);
}

template <typename... Arguments>
void KernelSelect::Launch(const char* name, uint64_t teams, Arguments... arguments) const {
  if (teams == 0) return;
  kernels_.Launch(name, BlocksForTeams(teams), kKernelThreads, stream_, arguments...);
}

}  // namespace tfdist
