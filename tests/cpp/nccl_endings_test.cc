// How groups of NCCL end: ranks that do not join, failures, aborts. FAKE_CUDA and FAKE_NCCL are the
// paths of the fake driver and the fake NCCL. A real NCCL has two processes on one GPU.
#include <atomic>
#include <chrono>
#include <csignal>
#include <string>
#include <thread>
#include <vector>

#include "cpp/calls.h"
#include "cpp/nccl_processes.h"
#include "cpp/nccl_threads.h"
#include "error.h"

namespace tfdist::testing {
namespace {

constexpr int kSystem = 2;
constexpr int kForEver = 1 << 30;
constexpr double kShort = 0.2;  // for waits that time out

// Sets a setting during its lifetime.
struct Setting {
  Setting(const char* name, int value) : name(name) { Set(name, value); }
  ~Setting() { Set(name, 0); }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;

  const char* const name;
};

NcclGroup::Setup Waiting(int rank, int size, const nccl::UniqueId& id, double seconds = 600) {
  NcclGroup::Setup setup{nullptr, id, rank, size};
  setup.timeout_seconds = seconds;
  return setup;
}

void Reduce(Rank& rank) {
  const cuda::Address data = rank.Put({}, 40);
  rank.group->AllReduce(data, data, 10, DType::kFloat32, ReduceOp::kSum, rank.stream.get());
}

void ExpectAborted(Rank& rank) {
  const std::string said = "The NCCL communicator of rank " + std::to_string(rank.number) + " of " +
                           std::to_string(rank.size) + " has been aborted.";
  ExpectError([&] { Reduce(rank); }, Code::kUnavailable, {said});
  ExpectError([&] { rank.group->Poll(); }, Code::kUnavailable, {said});
  ExpectError([&] { rank.group->Grouped([] {}); }, Code::kUnavailable, {said});
}

void NeverComes() {
  const nccl::UniqueId id = NcclGroup::NewId();
  OnEach(2, [&](int number) {
    ExpectError([&] { Rank rank(Waiting(number, 3, id, kShort)); }, Code::kUnavailable,
                {"ncclCommInitRankConfig of NCCL has been in progress on rank " +
                     std::to_string(number) + " of 3 for 0.2 s",
                 "other ranks have not joined", "NCCL_DEBUG=INFO"});
  });
}

// It joins after the others have polled many times.
void ComesLate() {
  const nccl::UniqueId id = NcclGroup::NewId();
  const int before = Calls("ncclCommGetAsyncError");
  OnEach(3, [&](int number) {
    while (number == 2 && Calls("ncclCommGetAsyncError") < before + 100) std::this_thread::yield();
    Rank rank(Waiting(number, 3, id));
    Reduce(rank);
  });
}

struct Impatience : Guard {
  void Check() override {
    if (++checks >= 5) throw Error(Code::kUnavailable, "rank 1 is lost");
  }
  int checks = 0;
};

// The guard knows of a lost rank before NCCL does.
void IsToldWhileWaiting() {
  Impatience guard;
  NcclGroup::Setup setup = Waiting(0, 2, NcclGroup::NewId());
  setup.guard = &guard;
  ExpectError([&] { Rank rank(setup); }, Code::kUnavailable, {"rank 1 is lost"});
  setup.id = NcclGroup::NewId();
  setup.size = 1;
  guard.checks = -kForEver;
  Rank rank(setup);
  const Setting polls("polls", kForEver);
  guard.checks = 0;
  ExpectError([&] { Reduce(rank); }, Code::kUnavailable, {"rank 1 is lost"});
  ExpectAborted(rank);
}

void DoesNotStart() {
  {
    const Setting fails("ncclCommInitRankConfig", kSystem);
    ExpectError([] { Rank rank(Waiting(0, 1, NcclGroup::NewId())); }, Code::kInternal,
                {"ncclCommInitRankConfig of NCCL 2.21.5 has failed: system error (no route)."});
  }
  {
    const Setting fails("ncclCommInitRankConfig", kSystem), memory("memory", 1);
    ExpectError([] { Rank rank(Waiting(0, 1, NcclGroup::NewId())); }, Code::kInternal,
                {"(Cuda failure 2 'out of memory'). NCCL needs GPU memory in addition to "
                 "TensorFlow's: set TF_FORCE_GPU_ALLOW_GROWTH=true."});
  }
  {
    const Setting fails("ncclGetUniqueId", kSystem);
    ExpectError([] { NcclGroup::NewId(); }, Code::kInternal, {"ncclGetUniqueId of NCCL"});
  }
  const Setting found_later("error", nccl::kRemoteError);
  ExpectError([] { Rank rank(Waiting(0, 1, NcclGroup::NewId())); }, Code::kUnavailable,
              {"ncclCommInitRankConfig of NCCL 2.21.5 has failed: a rank is gone"});
}

void FailsLater() {
  OnEachOf(2, [](Rank& rank) {
    Reduce(rank);
    rank.stream.Synchronize();
    rank.group->Poll();
  });
  const nccl::UniqueId id = NcclGroup::NewId();
  Rank rank(Waiting(0, 1, id));
  {
    const Setting error("error", nccl::kRemoteError);
    for (int times = 0; times < 2; ++times) {
      ExpectError([&] { rank.group->Poll(); }, Code::kUnavailable,
                  {"The communicator of NCCL 2.21.5 has failed: a rank is gone (no route)."});
    }
    ExpectError([&] { Reduce(rank); }, Code::kUnavailable, {"ncclAllReduce of NCCL"});
    const int aborts = Calls("ncclCommAbort");
    rank.group.reset();  // it cannot be finalized
    EXPECT(Calls("ncclCommAbort") == aborts + 1);
  }
  Rank next(Waiting(0, 1, NcclGroup::NewId()));
  const Setting error("ncclAllReduce", nccl::kInvalidUsage);
  ExpectError([&] { Reduce(next); }, Code::kInternal, {"ncclAllReduce of NCCL 2.21.5 has failed"});
}

void LaunchTakesTooLong() {
  Rank rank(Waiting(0, 1, NcclGroup::NewId(), kShort));
  const Setting polls("polls", kForEver);
  ExpectError([&] { Reduce(rank); }, Code::kUnavailable,
              {"ncclAllReduce of NCCL has been in progress on rank 0 of 1 for 0.2 s"});
  ExpectAborted(rank);
}

// A stream's work waits for rank 2, which never submits any.
void AbortsWhatHangs() {
  OnEachOf(3, [](Rank& rank) {
    if (rank.number == 2) return rank.group->Abort();
    for (int times = 0; times < 3; ++times) Reduce(rank);
    rank.group->Poll();
    DeviceEvent behind(rank.gpu);
    behind.Record(rank.stream.get());
    EXPECT(!behind.HasPassed());
    std::thread([&] { rank.group->Abort(); }).join();
    rank.stream.Synchronize();
    EXPECT(behind.HasPassed());
    rank.group->Abort();
    ExpectAborted(rank);
  });
}

// While one thread submits work, or waits for a call to finish, others poll and abort.
void AbortsBesideCalls() {
  for (const int polls : {0, 3, kForEver}) {
    Rank rank(Waiting(0, 1, NcclGroup::NewId()));
    const Setting setting("polls", polls);
    std::atomic<int> rounds{0};
    std::thread other([&] {
      while (rounds < (polls == kForEver ? 1 : 50)) rank.group->Poll();
      rank.group->Abort();
      rank.group->Abort();
    });
    ExpectError(
        [&] {
          for (;; ++rounds) {
            if (polls == kForEver) rounds = 1;
            if (rounds % 2) rank.group->Grouped([&] { Reduce(rank); });
            else Reduce(rank);
          }
        },
        Code::kUnavailable, {"has been aborted"});
    other.join();
  }
}

void EndsWithWorkUnderWay() {
  const nccl::UniqueId id = NcclGroup::NewId();
  OnEach(2, [&](int number) {
    NcclGroup::Setup setup = Waiting(number, 2, id);
    setup.closing_seconds = kShort;
    Rank rank(setup);
    if (number == 0) Reduce(rank);
    rank.group.reset();
    rank.stream.Synchronize();
  });
}

// An incomplete group of calls must not run: other ranks would wait for the rest.
void ThrowsInTheMiddle() {
  Rank rank(Waiting(0, 1, NcclGroup::NewId()));
  const cuda::Address data = rank.Put({}, 40);
  ExpectError(
      [&] {
        rank.group->Grouped([&] {
          Reduce(rank);
          rank.group->AllReduce(data, data, 10, DType::kInt32, ReduceOp::kMean, rank.stream.get());
        });
      },
      Code::kInvalidArgument, {"A mean is defined for floating types"});
  ExpectAborted(rank);
  // This thread's later calls are no longer part of the group.
  Rank next(Waiting(0, 1, NcclGroup::NewId()));
  const std::vector<char> values(40, 'x');
  const cuda::Address in = next.Put(values), out = next.Put({}, 40);
  next.group->AllReduce(in, out, 40, DType::kInt8, ReduceOp::kSum, next.stream.get());
  EXPECT(next.Has(out, values));
}

// The remaining process can use its GPU and NCCL.
void WorksOnAlone() {
  OnEachOf(1, [](Rank& rank) {
    Reduce(rank);
    rank.stream.Synchronize();
    rank.group->Poll();
  });
}

// Rank 0's launched work waits for another process that runs but launches nothing. Both ranks are
// aborted, and join a new group.
void APeerThatDoesNothing() {
  OnEachNcclProcess(2, [](NcclProcess& process) {
    {
      Rank rank(process.NextGroup());
      Reduce(rank);
      rank.stream.Synchronize();
      process.Synchronize();
      if (rank.number == 0) {
        Reduce(rank);
        DeviceEvent behind(rank.gpu);
        behind.Record(rank.stream.get());
        EXPECT(!behind.HasPassed());
        rank.group->Abort();
        rank.stream.Synchronize();
      }
      process.Synchronize();
      rank.group->Abort();
      ExpectAborted(rank);
    }
    Rank next(process.NextGroup());
    Reduce(next);
    next.stream.Synchronize();
  });
}

// NCCL's reports of a dead process differ; an abort ends everything.
void APeerThatIsKilled() {
  const auto killed = [](NcclProcess& process) {
    Rank rank(process.NextGroup());
    Reduce(rank);
    rank.stream.Synchronize();
    if (rank.number == 1) raise(SIGKILL);
    process.AwaitEndOf(1);
    try {
      for (int times = 0; times < 3; ++times) Reduce(rank);
      rank.group->Poll();
    } catch (const Error&) {}
    rank.group->Abort();
    rank.stream.Synchronize();
    ExpectAborted(rank);
    WorksOnAlone();
  };
  OnEachNcclProcess(2, killed, 1);
}

void InProcesses() {
  APeerThatDoesNothing();
  APeerThatIsKilled();
}

}  // namespace
}  // namespace tfdist::testing

int main() {
  using namespace tfdist::testing;
  return Report([] {
    InProcesses();
    if (!AreFake()) return;
    LoadLibraries();
    NeverComes();
    ComesLate();
    IsToldWhileWaiting();
    DoesNotStart();
    FailsLater();
    LaunchTakesTooLong();
    AbortsWhatHangs();
    AbortsBesideCalls();
    EndsWithWorkUnderWay();
    ThrowsInTheMiddle();
    EXPECT(HeldByNccl().empty());
  });
}
