// Timeouts count from the last progress: a canceled operation whose bytes move completes, however
// long that takes, and so does one that takes longer than the timeout; a stalled one is aborted.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <mutex>
#include <thread>

#include "cpp/calls.h"
#include "device/launch_order.h"
#include "error.h"
#include "operation_queue.h"

namespace tfdist::testing {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr double kPatience = 1;
// How long a link is slow, and how many bytes it lets pass meanwhile: fewer than the ranks send.
constexpr Seconds kSlow{1.5 * kPatience};
constexpr size_t kFewBytes = 512;
constexpr auto kPause = std::chrono::milliseconds(5);
constexpr size_t kMany = 300'000;  // elements

// Relays bytes between two ranks, at the speed that a test sets.
class Relay {
 public:
  // Replaces their data connection.
  Relay(Communicator::Setup* one, Communicator::Setup* other) {
    int* const ends[] = {&one->data[static_cast<size_t>(other->rank)],
                         &other->data[static_cast<size_t>(one->rank)]};
    for (int i = 0; i < 2; ++i) {
      int pair[2];
      EXPECT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
      // Otherwise all bytes would soon be in flight, which looks like progress of only the sender.
      const int small = 4096;
      for (const int end : pair) {
        EXPECT(setsockopt(end, SOL_SOCKET, SO_SNDBUF, &small, sizeof(small)) == 0);
      }
      close(*ends[i]);
      *ends[i] = pair[0];
      own_[i] = pair[1];
    }
    for (int i = 0; i < 2; ++i)
      threads_[i] = std::thread([this, i] { PassOn(own_[i], own_[1 - i]); });
  }

  ~Relay() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      slow_until_ = Clock::time_point();
    }
    changed_.notify_all();
    for (const int end : own_) shutdown(end, SHUT_RDWR);
    for (std::thread& thread : threads_) thread.join();
    for (const int end : own_) close(end);
  }

  void Slow() {
    const std::lock_guard<std::mutex> lock(mutex_);
    slow_until_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(kSlow);
  }
  void Stop() {
    const std::lock_guard<std::mutex> lock(mutex_);
    slow_until_ = Clock::time_point::max();
  }

 private:
  void PassOn(int from, int to) {
    char bytes[64 << 10];
    ssize_t got;
    while ((got = recv(from, bytes, sizeof(bytes), 0)) > 0) {
      for (ssize_t passed = 0; passed < got;) {
        const size_t most = std::min(static_cast<size_t>(got - passed), MaxBytes());
        const ssize_t sent = send(to, bytes + passed, most, MSG_NOSIGNAL);
        if (sent <= 0) return;
        passed += sent;
      }
    }
    shutdown(to, SHUT_WR);
  }

  size_t MaxBytes() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return slow_until_ != Clock::time_point::max(); });
    if (Clock::now() >= slow_until_) return 64 << 10;
    lock.unlock();
    std::this_thread::sleep_for(kPause);
    return kFewBytes;
  }

  int own_[2];
  std::thread threads_[2];
  std::mutex mutex_;
  std::condition_variable changed_;
  Clock::time_point slow_until_;
};

// Runs `body` on ranks of several hosts, with a relay between the first and the second.
void WithRelay(const Plan& plan, const std::function<void(Communicator&, Relay&)>& body) {
  Wiring wiring(plan);
  std::vector<Communicator::Setup> setups;
  for (int rank = 0; rank < plan.ranks; ++rank) {
    setups.push_back(wiring.Take(rank));
    setups.back().patience_seconds = kPatience;
  }
  Relay relay(&setups[0], &setups[1]);
  OnEachThread(std::move(setups), [&](Communicator& c) { body(c, relay); });
}

// All ranks have finished the earlier operation; then no more bytes pass.
void StopBetween(Communicator& c, Relay& relay, std::atomic<int>* ended) {
  Do(c, Kind::kAllReduce, 10);
  ++*ended;
  while (*ended < c.size()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  relay.Stop();
}

Call CallOf(Communicator& c, Kind kind, size_t count) {
  Call call(c, kind, count);
  call.operation.peer = 1 - c.rank();
  return call;
}

void Cancel(Call* call) {
  call->operation.cancellation = std::make_shared<Cancellation>();
  call->operation.cancellation->Ask();
}

// Runs an operation in the communicator's thread, as TensorFlow does.
std::future<void> Begin(Communicator& c, Call* call) {
  const auto ended = std::make_shared<std::promise<void>>();
  c.Enqueue(std::move(call->operation), [ended](const Error* error) {
    if (error) {
      ended->set_exception(std::make_exception_ptr(*error));
    } else {
      ended->set_value();
    }
  });
  return ended->get_future();
}

Kind SideOf(const Communicator& c, Kind kind) {
  return kind == Kind::kSend && c.rank() == 0 ? Kind::kReceive : kind;
}

// At the end of the data, over a slow link: the running operation, and the queued one.
void MovesAfterACancellation(const Plan& plan, Kind kind) {
  WithRelay(plan, [&](Communicator& c, Relay& relay) {
    Do(c, Kind::kBarrier, 0);
    if (c.rank() == 0) relay.Slow();
    Call running = CallOf(c, SideOf(c, kind), kMany), behind = CallOf(c, SideOf(c, kind), 10);
    Cancel(&running);
    Cancel(&behind);
    std::future<void> ended = Begin(c, &running);
    c.Run(std::move(behind.operation));
    ended.get();
    Do(c, Kind::kAllReduce, 10);
  });
}

void StallsAfterACancellation(const Plan& plan, Kind kind) {
  std::atomic<int> ended{0};
  WithRelay(plan, [&](Communicator& c, Relay& relay) {
    StopBetween(c, relay, &ended);
    Call call = CallOf(c, SideOf(c, kind), kMany);
    Cancel(&call);
    ExpectError([&] { c.Run(std::move(call.operation)); }, Code::kUnavailable,
                {"has given up its step, of which another operation has failed"});
  });
}

void MovesForLongerThanTheTimeout(Plan plan) {
  plan.timeout_seconds = kPatience;
  WithRelay(plan, [](Communicator& c, Relay& relay) {
    Do(c, Kind::kBarrier, 0);
    if (c.rank() == 0) relay.Slow();
    Do(c, Kind::kAllReduce, kMany);
    Do(c, Kind::kAllReduce, 10);
  });
}

void StallsForTheTimeout(Plan plan) {
  plan.timeout_seconds = kPatience;
  std::atomic<int> ended{0};
  WithRelay(plan, [&](Communicator& c, Relay& relay) {
    StopBetween(c, relay, &ended);
    ExpectError(
        [&] { Do(c, Kind::kAllReduce, kMany); }, Code::kUnavailable,
        {"all_reduce 'x'", "though all ranks have joined it, the longest that was allowed"});
  });
}

void Overdue() {
  constexpr auto patience = std::chrono::seconds(1);
  const auto hour = std::chrono::hours(1);
  Cancellation cancellation;
  const auto before = Clock::now();
  EXPECT(!cancellation.Overdue(before + hour, before - hour, patience));
  cancellation.Ask();
  const auto after = Clock::now();
  EXPECT(!cancellation.Overdue(before + std::chrono::milliseconds(900), before - hour, patience));
  EXPECT(cancellation.Overdue(after + std::chrono::seconds(2), before - hour, patience));
  EXPECT(!cancellation.Overdue(after + hour, after + hour - patience / 2, patience));
  EXPECT(cancellation.Overdue(after + hour, after + hour - 2 * patience, patience));
}

void LastProgress() {
  ProgressClock progress;
  const auto begin = Clock::now();
  EXPECT(progress.Last() < begin);
  const uint32_t count = progress.count();
  progress.Note();
  EXPECT(progress.count() != count);
  const auto first = progress.Last();
  EXPECT(first >= begin);
  EXPECT(progress.Last() == first);
  const auto later = Clock::now();
  progress.NoteOther();
  EXPECT(progress.Last() >= later);
}

void All() {
  Overdue();
  LastProgress();
  // On a host with two ranks, one waits for the data that the other moves.
  const Plan two = Arranged(2, 2, As::kThreads), three = Arranged(3, 2, As::kThreads);
  const std::vector<std::function<void()>> tests{
      [&] { MovesAfterACancellation(two, Kind::kAllReduce); },
      [&] { MovesAfterACancellation(two, Kind::kSend); },
      [&] { MovesAfterACancellation(three, Kind::kAllReduce); },
      [&] { MovesAfterACancellation(three, Kind::kBroadcast); },
      [&] { StallsAfterACancellation(two, Kind::kAllReduce); },
      [&] { StallsAfterACancellation(two, Kind::kSend); },
      [&] { StallsAfterACancellation(three, Kind::kAllReduce); },
      [&] { MovesForLongerThanTheTimeout(two); },
      [&] { MovesForLongerThanTheTimeout(three); },
      [&] { StallsForTheTimeout(two); }};
  AtOnce(tests.size(), [&](size_t i) { tests[i](); });
}

}  // namespace
}  // namespace tfdist::testing

int main() { return tfdist::testing::Report(tfdist::testing::All); }
