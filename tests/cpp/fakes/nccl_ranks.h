// The shared memory of the fake NCCL's ranks, and their work on it: all ranks map the same memory.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <set>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpp/fakes/held.h"
#include "device/nccl.h"
#include "reduce/half.h"

namespace tfdist::nccl {
namespace arithmetic {
#include "reduce/arithmetic.inc"
}  // namespace arithmetic

constexpr int kMaxRanks = 8;
constexpr size_t kSlotBytes = 4096;  // larger data are transferred in several rounds
inline fakes::Held held;

// The shared state of the ranks. All counts only grow, except those of messages.
struct Shared {
  std::atomic<uint64_t> joined, arrived, windows;
  std::atomic<uint32_t> full[kMaxRanks][kMaxRanks];  // a message from one rank to another
  char slots[kMaxRanks][kSlotBytes];
  char messages[kMaxRanks][kMaxRanks][kSlotBytes];
};

// Thrown when work is aborted.
struct Aborted {};

inline size_t SizeOf(Type type) {
  if (type == kInt8 || type == kUint8) return 1;
  if (type == kFloat16 || type == kBfloat16) return 2;
  return type == kInt32 || type == kFloat32 ? 4 : 8;
}

template <typename T, typename Partial, typename Reduction>
void ReduceAs(const std::vector<const char*>& in, size_t count, double divisor, char* out) {
  for (size_t i = 0; i < count; ++i) {
    const auto load = [i](const char* from) {
      T value;
      std::memcpy(&value, from + i * sizeof(T), sizeof(T));
      return static_cast<Partial>(arithmetic::Arithmetic<T>::Load(value));
    };
    Partial value = load(in[0]);
    for (size_t rank = 1; rank < in.size(); ++rank) value = Reduction::Apply(value, load(in[rank]));
    if (divisor != 1) value = static_cast<Partial>(value / divisor);
    T stored;
    arithmetic::Store(static_cast<typename arithmetic::Arithmetic<T>::Type>(value), &stored);
    std::memcpy(out + i * sizeof(T), &stored, sizeof(T));
  }
}

template <typename T, typename Partial = typename arithmetic::Arithmetic<T>::Type>
void ReduceBy(Op op, const std::vector<const char*>& in, size_t count, char* out) {
  using namespace arithmetic;
  switch (op) {
    case kSum:
      return ReduceAs<T, Partial, Sum>(in, count, 1, out);
    case kProduct:
      return ReduceAs<T, Partial, Product>(in, count, 1, out);
    case kMax:
      return ReduceAs<T, Partial, Max>(in, count, 1, out);
    case kMin:
      return ReduceAs<T, Partial, Min>(in, count, 1, out);
  }
  return ReduceAs<T, double, Sum>(in, count, static_cast<double>(in.size()), out);
}

inline void Reduce(Type type, Op op, const std::vector<const char*>& in, size_t count, char* out) {
  switch (type) {
    case kInt8:
      return ReduceBy<int8_t>(op, in, count, out);
    case kUint8:
      return ReduceBy<uint8_t>(op, in, count, out);
    case kInt32:
      return ReduceBy<int32_t>(op, in, count, out);
    case kInt64:
      return ReduceBy<int64_t>(op, in, count, out);
    case kFloat16:
      return ReduceBy<Float16>(op, in, count, out);
    case kBfloat16:
      return ReduceBy<Bfloat16>(op, in, count, out);
    case kFloat32:
      return ReduceBy<float>(op, in, count, out);
    case kFloat64:
      return ReduceBy<double>(op, in, count, out);
  }
}

struct Comm {
  Comm() { held.Count("communicators", 1); }
  ~Comm() {
    munmap(shared, sizeof(Shared));
    held.Count("communicators", -1);
  }

  // A call's remains belong to its thread, which may have ended before the next call.
  bool IsCleared() {
    const std::thread::id by = std::exchange(left, {});
    return by == std::thread::id() || by == std::this_thread::get_id();
  }

  // Runs in the thread of a stream.
  template <typename Ready>
  void WaitUntil(Ready ready) {
    while (!ready()) {
      if (aborted) throw Aborted{};
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  void Synchronize() {
    const auto ranks = static_cast<uint64_t>(size);
    const uint64_t all = (shared->arrived.fetch_add(1) / ranks + 1) * ranks;
    WaitUntil([&] { return shared->arrived >= all; });
  }
  // Each rank publishes `bytes` bytes, and reads the parts that it needs from all ranks.
  void Exchange(const void* in, size_t bytes,
                const std::function<void(size_t done, size_t now)>& take) {
    for (size_t done = 0; done < bytes; done += kSlotBytes) {
      const size_t now = std::min(bytes - done, kSlotBytes);
      std::memcpy(shared->slots[rank], static_cast<const char*>(in) + done, now);
      Synchronize();
      take(done, now);
      Synchronize();
    }
  }

  int rank = 0, size = 0, descriptor = -1;
  Shared* shared = nullptr;
  std::atomic<bool> aborted{false}, finalizing{false};
  std::atomic<int> polls{0};                 // number of polls for which it stays in progress
  std::thread::id left;                      // the thread whose call has left data behind
  std::atomic<uint64_t> given{0}, ended{0};  // batches, in the order of execution
  std::atomic<uint64_t> windows{0};          // registered so far
};

// A message, transferred one slot at a time.
struct Message {
  bool Advance(Comm* comm) {
    std::atomic<uint32_t>& full =
        sends ? comm->shared->full[comm->rank][peer] : comm->shared->full[peer][comm->rank];
    while (done < bytes && full == (sends ? 0 : 1)) {
      char* const at = sends ? comm->shared->messages[comm->rank][peer]
                             : comm->shared->messages[peer][comm->rank];
      const size_t now = std::min(bytes - done, kSlotBytes);
      if (sends) std::memcpy(at, data + done, now);
      else std::memcpy(data + done, at, now);
      done += now;
      full = sends ? 1 : 0;
    }
    return done == bytes;
  }

  bool sends;
  char* data;
  size_t bytes;
  int peer;
  size_t done = 0;
};

// A rank's work for a stream, submitted at once.
struct Batch {
  Comm* comm = nullptr;
  Stream* stream = nullptr;
  std::vector<std::function<void()>> collectives;
  std::vector<Message> messages;
  uint64_t number = 0;

  void Run() {
    try {
      comm->WaitUntil([&] { return comm->ended == number; });
      for (const auto& collective : collectives) collective();
      comm->WaitUntil([&] {
        bool all = true;
        std::set<std::pair<bool, int>> busy;  // messages between two ranks stay in order
        for (Message& message : messages) {
          const std::pair<bool, int> way{message.sends, message.peer};
          if (!busy.count(way) && !message.Advance(comm)) busy.insert(way);
          all &= busy.empty();
        }
        return all;
      });
    } catch (const Aborted&) {}
    ++comm->ended;
  }
};

}  // namespace tfdist::nccl
