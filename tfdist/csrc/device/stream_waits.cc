#include "device/stream_waits.h"

#include <chrono>
#include <limits>
#include <thread>

#include "error.h"

namespace tfdist {
namespace {

constexpr int kSpins = 200;  // each takes some µs
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
    return false;  // a GPU that has failed runs nothing any more
  }
}

namespace {

// The number of words of one rank: for each barrier, one word for each other rank.
constexpr size_t kWords = device::kBarrierWords;
static_assert(kWords == StreamBarriers::kMax * device::kMaxRanks);
// In the driver's comparison, this is larger than the number of any barrier.
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

// The approximate time limit of the measurement. For sizes that have not been measured by then, the
// second transport counts as faster.
constexpr double kMaxSeconds = 1.0;
// If a transport is slower by this factor, the measurement assumes that it will not be faster for
// larger sizes.
constexpr double kLost = 2.0;
constexpr size_t kStep = 4;  // ratio of a size to the previous size

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
    // This is the geometric mean of this size and the next size.
    if (all[0] < all[1]) most = bytes * kStep / 2;
    if (all[0] > kLost * all[1] || all[2] > kMaxSeconds) break;
  }
  return most;
}

}  // namespace tfdist
