#include "transport/segment.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <thread>

#include "error.h"

namespace tfdist {
namespace {

// The maximum time that a rank sleeps before it checks its guard. It must not sleep longer, because
// a rank that has died cannot wake it.
constexpr long kNapNanoseconds = 20'000'000;

long Futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr,
                 0);
}

}  // namespace

void FutexEvent::Signal() {
  signals.fetch_add(1, std::memory_order_seq_cst);
  Futex(&signals, FUTEX_WAKE, 1, nullptr);
}

void FutexEvent::Sleep(uint32_t seen) {
  const timespec nap{0, kNapNanoseconds};
  Futex(&signals, FUTEX_WAIT, seen, &nap);
}

SpinPolicy SpinPolicy::For(int ranks) {
  static const int cores = static_cast<int>(std::thread::hardware_concurrency());
  if (ranks <= cores) return {2000, 20};
  // There are more ranks than cores. A waiting rank does not spin, so that a rank without a core
  // can run immediately.
  return {0, 60};
}

void GiveCoreAway() { sched_yield(); }

namespace {

constexpr size_t kPage = 4096;

size_t RoundUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// The maximum size of a chunk. It is so large that a rank's room does not fit in the rank's L2
// cache, because other cores can read data faster from the L3 cache than from another core's L2
// cache. All rooms together take at most 32 MiB, unless a host has more than 90 ranks.
size_t ChunkBytes(int ranks) {
  const auto n = static_cast<size_t>(ranks);
  const size_t share = (size_t{32} << 20) / (4 * n) / kPage * kPage;
  return std::max(std::min(share, size_t{512} << 10), n * (size_t{1} << 10));
}

// The size of the buffer of a ring. The buffers of all pairs of ranks together take at most 16 MiB,
// unless a host has more than 64 ranks.
size_t RingBytes(int ranks) {
  const auto pairs = static_cast<size_t>(ranks) * static_cast<size_t>(ranks);
  const size_t share = (size_t{16} << 20) / pairs / kPage * kPage;
  return std::clamp<size_t>(share, kPage, size_t{1} << 20);
}

}  // namespace

size_t Segment::BytesFor(int ranks) {
  const auto n = static_cast<size_t>(ranks);
  return RoundUp(sizeof(Header), kPage) + RoundUp(n * sizeof(Progress), kPage) +
         RoundUp(n * kEagerSlots * sizeof(EagerSlot), kPage) +
         RoundUp(n * n * sizeof(Ring), kPage) + n * n * RingBytes(ranks) +
         (kSlots + 1) * n * ChunkBytes(ranks) + kStreamWordBytes;
}

Segment::Segment(int descriptor, size_t bytes, int ranks)
    : memory_(MAP_FAILED), bytes_(bytes), ranks_(ranks), mapped_(true) {
  struct stat status{};
  // Checks the size of the file. If the file were too short, an access beyond its end would kill
  // this process.
  const bool fits = bytes >= BytesFor(ranks) && fstat(descriptor, &status) == 0 &&
                    status.st_size >= static_cast<off_t>(bytes);
  if (fits) memory_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  const int error = errno;
  close(descriptor);
  if (!fits) throw Error(Code::kInvalidArgument, "The shared memory is too small.");
  if (memory_ == MAP_FAILED) {
    throw Error(Code::kInternal,
                std::string("The shared memory cannot be mapped: ") + std::strerror(error) + ".");
  }
  Lay();
}

Segment::Segment(void* memory, size_t bytes, int ranks)
    : memory_(memory), bytes_(bytes), ranks_(ranks), mapped_(false) {
  if (bytes < BytesFor(ranks)) {
    throw Error(Code::kInvalidArgument, "The shared memory is too small.");
  }
  Lay();
}

Segment::~Segment() {
  if (mapped_) munmap(memory_, bytes_);
}

void Segment::Lay() {
  const auto n = static_cast<size_t>(ranks_);
  chunk_bytes_ = ChunkBytes(ranks_);
  ring_bytes_ = RingBytes(ranks_);
  char* next = static_cast<char*>(memory_);
  const auto take = [&next](size_t bytes) {
    char* taken = next;
    next += RoundUp(bytes, kPage);
    return taken;
  };
  header_ = reinterpret_cast<Header*>(take(sizeof(Header)));
  progress_ = reinterpret_cast<Progress*>(take(n * sizeof(Progress)));
  eager_slots_ = reinterpret_cast<EagerSlot*>(take(n * kEagerSlots * sizeof(EagerSlot)));
  rings_ = reinterpret_cast<Ring*>(take(n * n * sizeof(Ring)));
  ring_data_ = take(n * n * ring_bytes_);
  rooms_ = take((kSlots + 1) * n * chunk_bytes_);
  stream_words_ = take(kStreamWordBytes);
}

void Segment::Abort(const Error& error) {
  if (header_->writing.exchange(1) == 0) {
    header_->event = static_cast<uint32_t>(error.event());
    std::strncpy(header_->worker, error.worker().c_str(), sizeof(header_->worker) - 1);
    std::strncpy(header_->message, error.what(), sizeof(header_->message) - 1);
    header_->aborted.store(static_cast<uint32_t>(error.code()), std::memory_order_release);
  }
  WakeAll();
}

Error Segment::abort_error() const {
  const auto code = static_cast<Code>(header_->aborted.load(std::memory_order_acquire));
  const auto text = [](const char* from, size_t most) {
    return std::string(from, strnlen(from, most));
  };
  return Error(code, text(header_->message, sizeof(header_->message)),
               static_cast<Event>(header_->event % kEvents),
               text(header_->worker, sizeof(header_->worker)));
}

void Segment::WakeAll() {
  for (int rank = 0; rank < ranks_; ++rank) progress_[rank].event.Signal();
}

}  // namespace tfdist
