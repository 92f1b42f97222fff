#include "device/stream_meetings.h"

#include <limits>

namespace tfdist {
namespace {

// Of a rank; for each meeting one of each other rank.
constexpr size_t kWords = device::kMeetingWords;
static_assert(kWords == StreamMeetings::kMost * device::kMostRanks);
// Beyond any number of a meeting, as the driver compares them.
constexpr uint64_t kEndless = std::numeric_limits<int64_t>::max();

}  // namespace

StreamMeetings::StreamMeetings(const Gpu& gpu, void* words, uint32_t rank, uint32_t ranks)
    : gpu_(gpu),
      words_(static_cast<uint64_t*>(words)),
      memory_(gpu, words, kWordBytes),
      rank_(rank),
      ranks_(ranks) {}

uint64_t* StreamMeetings::WordsOf(uint32_t rank, uint64_t meeting) const {
  return cuda::PointerTo<uint64_t>(memory_.address()) + rank * kWords +
         meeting % kMost * device::kMostRanks;
}

void StreamMeetings::Await(uint64_t meeting, cuda::Stream* stream) const {
  gpu_.Use();
  for (uint32_t other = 0; other < ranks_; ++other) {
    if (other == rank_) continue;
    const cuda::Address word = cuda::AddressOf(WordsOf(rank_, meeting) + other);
    cuda::Check(cuda::Load().cuStreamWaitValue64_v2(stream, word, meeting, cuda::kReached),
                "cuStreamWaitValue64_v2");
  }
}

void StreamMeetings::Release() noexcept {
  uint64_t* const own = words_ + rank_ * kWords;
  for (size_t i = 0; i < kWords; ++i) __atomic_store_n(own + i, kEndless, __ATOMIC_RELEASE);
}

}  // namespace tfdist
