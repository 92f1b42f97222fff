#include "device/stream_waits.h"

#include <chrono>
#include <limits>
#include <thread>

#include "error.h"

namespace tfdist {
namespace {

// The number of polls after which a wait begins to sleep between two polls. Until then, it only
// yields the CPU between them. A poll takes a few µs.
constexpr int kSpins = 200;
constexpr int kLooksForOneCheck = 20;
constexpr auto kPause = std::chrono::microseconds(50);
constexpr auto kSoon = std::chrono::seconds(5);

}  // namespace

void AwaitPassed(const std::function<bool()>& has_passed, const std::function<bool()>& ends) {
  for (int looks = 1; !has_passed() && !ends(); ++looks) {
    if (looks < kSpins) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kPause);
    }
  }
}

void Await(const DeviceEvent& event, Guard& guard, const std::function<void()>& check) {
  int looks = 0;
  AwaitPassed([&] { return event.HasPassed(); },
              [&] {
                guard.Check();
                if (check && ++looks % kLooksForOneCheck == 0) check();
                return false;
              });
}

bool SettleSoon(cuda::Stream* stream, DeviceEvent& event) noexcept {
  const auto end = std::chrono::steady_clock::now() + kSoon;
  try {
    event.Record(stream);
    while (!event.HasPassed()) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  } catch (const Error&) {
    return false;  // the GPU has failed, so the stream has no more work to finish
  }
}

namespace {

// The number of words of one rank. For each barrier, a rank has one word for each other rank.
constexpr size_t kWords = device::kBarrierWords;
static_assert(kWords == StreamBarriers::kMax * device::kMaxRanks);
// The value that ends all waits for a word: the driver compares words as signed numbers of 64 bits,
// and this is the largest one.
constexpr uint64_t kEndless = std::numeric_limits<int64_t>::max();

}  // namespace

StreamBarriers::StreamBarriers(const Gpu& gpu, void* words, uint32_t rank, uint32_t ranks)
    : gpu_(gpu),
      words_(static_cast<uint64_t*>(words)),
      memory_(gpu, words, kWordBytes),
      rank_(rank),
      ranks_(ranks) {}

uint64_t* StreamBarriers::WordsOf(uint32_t rank, uint64_t barrier) const {
  return cuda::PointerTo<uint64_t>(memory_.address()) + rank * kWords +
         barrier % kMax * device::kMaxRanks;
}

void StreamBarriers::Await(uint64_t barrier, cuda::Stream* stream) const {
  gpu_.Use();
  for (uint32_t other = 0; other < ranks_; ++other) {
    if (other == rank_) continue;
    const cuda::Address word = cuda::AddressOf(WordsOf(rank_, barrier) + other);
    cuda::Check(cuda::Load().cuStreamWaitValue64_v2(stream, word, barrier, cuda::kReached),
                "cuStreamWaitValue64_v2");
  }
}

void StreamBarriers::Release() noexcept {
  uint64_t* const own = words_ + rank_ * kWords;
  for (size_t i = 0; i < kWords; ++i) __atomic_store_n(own + i, kEndless, __ATOMIC_RELEASE);
}

namespace {

using Clock = std::chrono::steady_clock;

// The approximate time limit of the measurement, in seconds. If it is reached, the larger sizes are
// not measured, and the second transport is used for them.
constexpr double kMaxSeconds = 1.0;
// If the first transport takes longer than the second one by this factor, the larger sizes are not
// measured, because the first transport is unlikely to be faster for them.
constexpr double kLost = 2.0;
constexpr size_t kStep = 4;  // the ratio of each measured size to the previous one

}  // namespace

std::vector<size_t> TriedSizes() {
  std::vector<size_t> sizes;
  for (size_t bytes = size_t{4} << 10; bytes <= size_t{16} << 20; bytes *= kStep) {
    sizes.push_back(bytes);
  }
  return sizes;
}

size_t WhereFirstIsFaster(
    const std::function<double(bool first, size_t bytes)>& seconds,
    const std::function<std::vector<double>(const std::vector<double>&)>& slowest) {
  const auto begin = Clock::now();
  size_t most = 0;
  for (const size_t bytes : TriedSizes()) {
    const double own_first = seconds(true, bytes), own_second = seconds(false, bytes);
    const double spent = std::chrono::duration<double>(Clock::now() - begin).count();
    const std::vector<double> all = slowest({own_first, own_second, spent});
    // The first transport is faster for this size. Assume that it is also faster up to the
    // geometric mean of this size and the next size.
    if (all[0] < all[1]) most = bytes * kStep / 2;
    if (all[0] > kLost * all[1] || all[2] > kMaxSeconds) break;
  }
  return most;
}

}  // namespace tfdist
