// Groups of NCCL whose ranks are threads or processes: values, order, and consecutive groups. See
// `nccl_threads.h` for the libraries. A real NCCL has one rank, or NCCL_RANKS processes, on one
// GPU.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#include "cpp/calls.h"
#include "cpp/nccl_processes.h"
#include "cpp/nccl_threads.h"
#include "cpp/values.h"
#include "error.h"

namespace tfdist::testing {
namespace {

constexpr int kRanks = 3, kSystem = 2;
constexpr size_t kCount = 1500;  // more than one round transfers
constexpr size_t kRegistered = size_t{8} << 20;

// The values of `Fill` for all ranks, concatenated.
std::vector<char> Joined(DType type, int ranks, size_t count) {
  std::vector<char> all;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::vector<char> part = Fill(type, count, rank);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

void Reductions(Rank& rank) {
  for (int i = 0; i < kDTypes * kReduceOps; ++i) {
    const auto type = static_cast<DType>(i / kReduceOps);
    const auto op = static_cast<ReduceOp>(i % kReduceOps);
    const bool loses_nans = IsFloating(type) && (op == ReduceOp::kMin || op == ReduceOp::kMax);
    const bool is_undefined = !IsFloating(type) && op == ReduceOp::kMean;
    EXPECT(NcclSupports(type, op) == !(loses_nans || is_undefined));
    const std::vector<char> own = Fill(type, kCount, rank.number);
    const cuda::Address in = rank.Put(own), out = rank.Put({}, own.size());
    const auto reduce = [&](cuda::Address to) {
      rank.group->AllReduce(in, to, kCount, type, op, rank.stream.get());
    };
    if (!NcclSupports(type, op)) {
      ExpectError([&] { reduce(out); }, Code::kInvalidArgument,
                  {loses_nans ? "NCCL loses NaNs in the m" : "A mean is defined for floating"});
      continue;
    }
    const std::vector<char> expected = Expected(type, op, rank.size, kCount);
    reduce(out);
    EXPECT(rank.Has(out, expected) && rank.Has(in, own));
    reduce(in);
    EXPECT(rank.Has(in, expected));
    // Each rank takes its part of the whole, in place.
    const size_t part = kCount / static_cast<size_t>(rank.size), bytes = part * SizeOf(type);
    const cuda::Address whole = rank.Put(own);
    const cuda::Address mine = whole + static_cast<size_t>(rank.number) * bytes;
    rank.group->ReduceScatter(whole, mine, part, type, op, rank.stream.get());
    const auto begin = expected.begin() + static_cast<long>(mine - whole);
    EXPECT(rank.Has(mine, {begin, begin + static_cast<long>(bytes)}));
  }
}

void OtherCollectives(Rank& rank) {
  for (const DType type : {DType::kBool, DType::kBfloat16, DType::kInt64}) {
    const std::vector<char> own = Fill(type, kCount, rank.number);
    const std::vector<char> all = Joined(type, rank.size, kCount);
    const cuda::Address in = rank.Put(own), gathered = rank.Put({}, all.size());
    rank.group->AllGather(in, gathered, kCount, type, rank.stream.get());
    EXPECT(rank.Has(gathered, all));
    const int root = rank.size - 1;
    rank.group->Broadcast(in, in, kCount, type, root, rank.stream.get());
    EXPECT(rank.Has(in, Fill(type, kCount, root)));
  }
  const cuda::Address nothing = rank.Put({});
  rank.group->AllReduce(nothing, nothing, 0, DType::kInt8, ReduceOp::kSum, rank.stream.get());
  rank.stream.Synchronize();
}

// Messages between all ranks, including each to itself, and two reductions, in one launch.
void Groups(Rank& rank) {
  const DType type = DType::kFloat32;
  const size_t bytes = kCount * SizeOf(type);
  const std::vector<char> own = Fill(type, kCount, rank.number);
  const cuda::Address in = rank.Put(own), sum = rank.Put({}, bytes), product = rank.Put({}, bytes);
  const cuda::Address received = rank.Put({}, bytes * static_cast<size_t>(rank.size));
  rank.group->Grouped([&] {
    rank.group->AllReduce(in, sum, kCount, type, ReduceOp::kSum, rank.stream.get());
    rank.group->AllReduce(in, product, kCount, type, ReduceOp::kProduct, rank.stream.get());
    for (int peer = 0; peer < rank.size; ++peer) {
      rank.group->Send(in, kCount, type, peer, rank.stream.get());
      rank.group->Recv(received + static_cast<size_t>(peer) * bytes, kCount, type, peer,
                       rank.stream.get());
    }
  });
  EXPECT(rank.Has(sum, Expected(type, ReduceOp::kSum, rank.size, kCount)));
  EXPECT(rank.Has(product, Expected(type, ReduceOp::kProduct, rank.size, kCount)));
  EXPECT(rank.Has(received, Joined(type, rank.size, kCount)));
  rank.group->Grouped([] {});
}

// Memory allocated by NCCL, which all ranks register: as a window if supported.
void Registration(Rank& rank) {
  const DType type = DType::kFloat32;
  const std::vector<char> own = Fill(type, kCount, rank.number);
  const cuda::Address data = rank.group->Allocate(kRegistered);
  EXPECT(data);
  rank.group->Register(data, kRegistered);
  rank.Copy(data, reinterpret_cast<uintptr_t>(own.data()), own.size());
  rank.group->AllReduce(data, data, kCount, type, ReduceOp::kSum, rank.stream.get());
  EXPECT(rank.Has(data, Expected(type, ReduceOp::kSum, rank.size, kCount)));
  rank.group->Free(data);
}

// Earlier work of the stream runs before, later work after.
void Order(Rank& rank) {
  const cuda::Address data = rank.Put({}, 2000), copy = rank.Put({}, 2000);
  DeviceStream before(rank.gpu), behind(rank.gpu);
  DeviceEvent filled(rank.gpu), reduced(rank.gpu);
  cuda::Load().cuMemsetD32Async(data, 14, 500, before.get());
  filled.Record(before.get());
  filled.HoldBack(rank.stream.get());
  rank.group->AllReduce(data, data, 500, DType::kInt32, ReduceOp::kSum, rank.stream.get());
  reduced.Record(rank.stream.get());
  reduced.HoldBack(behind.get());
  cuda::Load().cuMemcpyAsync(copy, data, 2000, behind.get());
  behind.Synchronize();
  EXPECT(reduced.HasPassed());
  const int expected = 14 * rank.size;
  const auto* bytes = reinterpret_cast<const char*>(&expected);
  EXPECT(rank.Has(copy + 499 * sizeof(int), {bytes, bytes + sizeof(int)}));
}

void Everything(Rank& rank) {
  Reductions(rank);
  OtherCollectives(rank);
  Groups(rank);
  Registration(rank);
  Order(rank);
  rank.group->Poll();
}

// Groups that have ended leave nothing behind.
constexpr int kTimes = 100;

// The same with processes, in consecutive groups.
void InProcesses(int ranks) {
  OnEachNcclProcess(ranks, [](NcclProcess& process) {
    {
      Rank rank(process.NextGroup());
      Everything(rank);
    }
    for (int round = 0; round < kTimes; ++round) {
      Rank rank(process.NextGroup());
      Order(rank);
    }
    if (!AreFake()) return;
    EXPECT(HeldByNccl().empty());
    const bool has_windows = nccl::Load().version >= 22700;
    EXPECT(Calls("ncclCommWindowRegister") == (has_windows ? 1 : 0));
    EXPECT(Calls("ncclCommRegister") == (has_windows ? 0 : 1));
  });
}

// Memory that cannot be allocated or registered by NCCL is replaced by other memory.
void WithoutRegistration() {
  Set("ncclCommRegister", kSystem);
  OnEachOf(2, Registration);
  Set("ncclCommRegister", 0);
  Set("ncclMemAlloc", kSystem);
  OnEachOf(1, [](Rank& rank) { EXPECT(!rank.group->Allocate(kRegistered)); });
  Set("ncclMemAlloc", 0);
}

// Every call is in progress for a while, and so is a group of calls.
void Slow() {
  Set("polls", 20);
  const int before = Calls("ncclCommGetAsyncError");
  OnEachOf(kRanks, [](Rank& rank) {
    Order(rank);
    Groups(rank);
  });
  EXPECT(Calls("ncclCommGetAsyncError") - before >= 20 * kRanks);
  Set("polls", 0);
}

// Each call in its own thread, which ends before the next.
void Threads() {
  std::unique_ptr<Rank> rank;
  const auto apart = [](const std::function<void()>& body) { OnEach(1, [&](int) { body(); }); };
  const NcclGroup::Setup setup{nullptr, NcclGroup::NewId(), 0, 1};
  apart([&] { rank = std::make_unique<Rank>(setup); });
  apart([&] { Order(*rank); });
  apart([&] { Groups(*rank); });
  const int aborts = Calls("ncclCommAbort");
  rank.reset();
  EXPECT(Calls("ncclCommAbort") == aborts);
}

// The wait for a missing rank ends, and an aborted group does nothing more.
void Ends() {
  const NcclGroup::Setup alone{nullptr, NcclGroup::NewId(), 0, 2, 2};
  ExpectError([&] { Rank rank(alone); }, Code::kUnavailable, {"for 2.0 s"});
  OnEachOf(1, [](Rank& rank) {
    const cuda::Address data = rank.Put({}, 2000);
    rank.group->Abort();
    ExpectError(
        [&] {
          rank.group->AllReduce(data, data, 500, DType::kInt32, ReduceOp::kSum, rank.stream.get());
        },
        Code::kUnavailable, {"abort"});
  });
}

void Anew(int ranks) {
  for (int round = 0; round < kTimes; ++round) OnEachOf(ranks, Order);
  if (AreFake()) EXPECT(HeldByNccl().empty());
}

// The time of a call that does not wait for its result.
void Launches(Rank& rank) {
  const cuda::Address data = rank.Put({}, 8192);
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const auto start = now();
  for (int i = 0; i < 100; ++i) {
    rank.group->AllReduce(data, data, 2048, DType::kFloat32, ReduceOp::kSum, rank.stream.get());
  }
  const std::chrono::duration<double, std::micro> launched = now() - start;
  rank.stream.Synchronize();
  std::printf("8 KiB among %d: launched in %.1f us\n", rank.size, launched.count() / 100);
}

void OnAGpu() {
  const char* const set = std::getenv("NCCL_RANKS");
  if (set) return InProcesses(std::atoi(set));
  LoadLibraries();
  std::printf("NCCL %d\n", nccl::Load().version);
  OnEachOf(1, Everything);
  OnEachOf(1, Launches);
  Ends();
  Anew(1);
}

}  // namespace
}  // namespace tfdist::testing

int main() {
  using namespace tfdist::testing;
  return Report([] {
    if (!AreFake()) return OnAGpu();
    for (const char* const version : {"22105", "23203"}) {
      setenv("FAKE_NCCL_VERSION", version, 1);
      InProcesses(2);
    }
    unsetenv("FAKE_NCCL_VERSION");
    LoadLibraries();
    OnEachOf(kRanks, Everything);
    OnEachOf(1, Everything);
    WithoutRegistration();
    Slow();
    Threads();
    Ends();
    Anew(2);
  });
}
