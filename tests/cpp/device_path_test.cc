// Collectives of GPU memory: values by each transport.
#include <vector>

#include "cpp/device_calls.h"
#include "cpp/nccl_threads.h"

namespace tfdist::testing {
namespace {

void Reductions(Communicator& c, Memory& memory) {
  for (const DType type : {DType::kFloat32, DType::kFloat16, DType::kInt32, DType::kBool}) {
    for (int o = 0; o < kReduceOps; ++o) {
      const auto op = static_cast<ReduceOp>(o);
      if (op == ReduceOp::kMean && !IsFloating(type)) continue;
      AllReduce(c, memory, type, op, {17, 3, 0, 5});
      AllReduce(c, memory, type, op, {5000, 7, 900});
    }
  }
}

void OtherCollectives(Communicator& c, Memory& memory) {
  constexpr size_t kCount = 700;
  const DType type = DType::kFloat32;
  const int root = c.size() - 1;
  memory.Clear();
  const std::vector<char> own = Fill(type, kCount, c.rank());
  const size_t bytes = own.size(), ranks = static_cast<size_t>(c.size());
  char* const data = Pointer(memory.Put(own));

  Operation broadcast = OnDevice(memory, Kind::kBroadcast, type, ReduceOp::kSum, "broadcast");
  broadcast.fingerprint.root = root;
  broadcast.in = ConstBufferList(data, bytes);
  broadcast.out = BufferList(data, bytes);
  c.Run(std::move(broadcast));
  EXPECT(memory.Has(reinterpret_cast<uintptr_t>(data), Fill(type, kCount, root)));

  // Each rank has a different number of rows; memory is allocated once all numbers are known.
  const size_t rows = static_cast<size_t>(c.rank()) + 1;
  cuda::Address gathered = 0;
  Operation gather = OnDevice(memory, Kind::kAllGather, type, ReduceOp::kSum, "gather");
  gather.row_bytes = 4;
  gather.sent_rows = {rows};
  gather.in = ConstBufferList(data, rows * 4);
  gather.allocate = [&](const std::vector<size_t>& all) {
    size_t total = 0;
    for (const size_t each : all) total += each * 4;
    gathered = memory.Take(total);
    return BufferList(Pointer(gathered), total);
  };
  c.Run(std::move(gather));
  std::vector<char> expected;
  for (size_t rank = 0; rank < ranks; ++rank) {
    const std::vector<char> part = Fill(type, rank + 1, root);
    expected.insert(expected.end(), part.begin(), part.end());
  }
  EXPECT(memory.Has(gathered, expected));

  memory.Clear();
  const cuda::Address whole = memory.Put(Fill(type, kCount * ranks, c.rank()));
  const cuda::Address part = memory.Take(bytes);
  Operation scatter = OnDevice(memory, Kind::kReduceScatter, type, ReduceOp::kSum, "scatter");
  scatter.in = ConstBufferList(Pointer(whole), bytes * ranks);
  scatter.out = BufferList(Pointer(part), bytes);
  c.Run(std::move(scatter));
  const size_t offset = kCount * static_cast<size_t>(c.rank());
  EXPECT(memory.Has(part, Expected(type, ReduceOp::kSum, c.size(), kCount, offset)));
}

// Several operations that are only launched, and one that waits for them.
void Launched(Communicator& c, Memory& memory) {
  constexpr size_t kCount = 3000;
  const DType type = DType::kFloat32;
  memory.Clear();
  std::vector<cuda::Address> places;
  for (int i = 0; i < 5; ++i) {
    const std::vector<char> values = Fill(type, kCount, c.rank(), static_cast<size_t>(i));
    places.push_back(memory.Put(values));
    Operation operation = OnDevice(memory, Kind::kAllReduce, type, ReduceOp::kSum, "gradients");
    operation.launches = true;
    operation.in = ConstBufferList(Pointer(places.back()), values.size());
    operation.out = BufferList(Pointer(places.back()), values.size());
    c.Run(std::move(operation));
  }
  Operation await = OnDevice(memory, Kind::kAllReduce, type, ReduceOp::kSum, "gradients");
  await.awaits = true;
  c.Run(std::move(await));
  for (size_t i = 0; i < places.size(); ++i) {
    EXPECT(memory.Has(places[i], Expected(type, ReduceOp::kSum, c.size(), kCount, i)));
  }
}

// The first operation is a message: no rank outside it may be needed.
void Values(Communicator& c) {
  Memory memory;
  Message(c, memory, 700);
  Reductions(c, memory);
  // More bytes than the receiver's buffers hold, and none.
  for (const size_t count : {40'000u, 0u, 9'000u, 5u}) Message(c, memory, count);
  OtherCollectives(c, memory);
  Launched(c, memory);
}

// Messages of many chunks, with slow copies on one side.
void SlowSide(Communicator& c, int slow) {
  if (c.rank() == slow) setenv("FAKE_CUDA_SLOW_COPIES", "300", 1);  // µs
  Memory memory;
  for (const size_t count : {40'000u, 9'000u}) Message(c, memory, count);
}

// Several chunks, with tensors that end within them.
void Large(Communicator& c) {
  Memory memory;
  AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {1'500'000, 3, 1'000'000});
  AllReduce(c, memory, DType::kFloat16, ReduceOp::kMean, {2 << 20});
}

// The first operation is no message, so that small tensors are fused in memory allocated by NCCL.
// Args: version: NCCL's; registers: the function that registers this memory.
void WithNccl(const char* version, const char* registers) {
  setenv("FAKE_NCCL_VERSION", version, 1);
  OnEachRank(PlanFor("nccl", 2, 1, As::kProcesses), [registers](Communicator& c) {
    Memory memory;
    Reductions(c, memory);
    Launched(c, memory);
    EXPECT(Calls(registers) == 1);
  });
  unsetenv("FAKE_NCCL_VERSION");
}

void WithFakes() {
  // Processes come first, since none may have a driver before it forks.
  for (const char* const transport : {"", "nccl", "host"}) {
    OnEachRank(PlanFor(transport, 2, 1, As::kProcesses), Values);
  }
  WithNccl("22105", "ncclCommRegister");
  WithNccl("23203", "ncclCommWindowRegister");
  OnEachRank(PlanForStreams(2, As::kProcesses), Values);
  for (const int slow : {0, 1}) {
    OnEachRank(PlanFor("p2p", 2, 1, As::kProcesses),
               [slow](Communicator& c) { SlowSide(c, slow); });
  }
  for (const char* const transport : {"p2p", "nccl", "host"}) {
    OnEachRank(PlanFor(transport, 3, 1, As::kThreads), Values);
  }
  OnEachRank(PlanForStreams(3, As::kThreads), Values);
  for (const char* const transport : {"", "nccl"}) {
    OnEachRank(PlanFor(transport, 4, 2, As::kThreads), Values);
  }
  OnEachRank(PlanFor("", 1, 1, As::kThreads), [](Communicator& c) {
    Memory memory;
    Reductions(c, memory);
  });
  OnEachRank(PlanFor("host", 2, 1, As::kThreads), Large);
  // Small operations by kernels, larger ones by NCCL, in one stream.
  Plan both = PlanFor("", 2, 1, As::kThreads);
  both.device->nccl = Environment("FAKE_NCCL");
  OnEachRank(both, [](Communicator& c) {
    Memory memory;
    for (const size_t count : {40u, 100'000u, 7u}) {
      AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {count, 3});
    }
  });
}

void OnAGpu() {
  for (const char* const transport : {"p2p", "host"}) {
    OnEachRank(PlanFor(transport, 2, 1, As::kProcesses), Values);
  }
  for (const int ranks : {2, 4}) OnEachRank(PlanForStreams(ranks, As::kProcesses), Values);
  OnEachRank(PlanFor("host", 2, 1, As::kProcesses), Large);
  // a version that lets two ranks share a GPU
  if (!Environment("NCCL_RANKS").empty()) {
    OnEachRank(PlanFor("nccl", 2, 1, As::kProcesses), Values);
  }
  for (const char* const transport : {"p2p", "host"}) {
    OnEachRank(PlanFor(transport, 2, 1, As::kThreads), Values);
  }
}

}  // namespace
}  // namespace tfdist::testing

int main() {
  using namespace tfdist::testing;
  return Report(FakeDriver().empty() ? OnAGpu : WithFakes);
}
