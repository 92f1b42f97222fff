// Several communicators that use the same GPUs concurrently, called in different orders. Each GPU
// runs its work in one order, so an operation that waits for another GPU delays all later work.
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpp/device_calls.h"
#include "device/launch_order.h"

namespace tfdist::testing {
namespace {

constexpr DType kFloat = DType::kFloat32;

// The communicators of each rank, each with its own GPU.
class Groups {
 public:
  Groups(const Plan& plan, size_t count) {
    for (size_t group = 0; group < count; ++group) {
      wirings_.push_back(std::make_unique<Wiring>(plan));
      setups_.emplace_back();
      for (int rank = 0; rank < plan.ranks; ++rank) {
        setups_.back().push_back(wirings_.back()->Take(rank));
        setups_.back().back().device->gpus[0].number = rank;
        setups_.back().back().name = "group " + std::to_string(group);
      }
    }
  }

  // Runs `body` for each communicator of each rank, each in its own thread.
  void Run(const std::function<void(Communicator&)>& body) {
    std::vector<std::future<void>> groups;
    for (auto& setups : setups_) {
      groups.push_back(
          std::async(std::launch::async, [&] { OnEachThread(std::move(setups), body); }));
    }
    for (std::future<void>& group : groups) group.get();
  }

 private:
  std::vector<std::unique_ptr<Wiring>> wirings_;
  std::vector<std::vector<Communicator::Setup>> setups_;
};

void Gather(Communicator& c, Memory& memory, size_t rows) {
  memory.Clear();
  const auto size = static_cast<size_t>(c.size());
  const std::vector<char> values = Fill(kFloat, rows, c.rank());
  const cuda::Address in = memory.Put(values), out = memory.Take(values.size() * size);
  Operation operation = OnDevice(memory, Kind::kAllGather, kFloat, ReduceOp::kSum, "rows");
  operation.row_bytes = sizeof(float);
  operation.sent_rows = {rows};
  operation.in = ConstBufferList(Pointer(in), values.size());
  operation.allocate = [&](const std::vector<size_t>&) {
    memory.Ready();  // after the GPU's work so far
    return BufferList(Pointer(out), values.size() * size);
  };
  c.Run(std::move(operation));
  std::vector<char> expected;
  for (int rank = 0; rank < c.size(); ++rank) {
    const std::vector<char> part = Fill(kFloat, rows, rank);
    expected.insert(expected.end(), part.begin(), part.end());
  }
  EXPECT(memory.Has(out, expected));
}

void Values(const std::string& transport, int hosts, size_t groups, int rounds) {
  Groups(PlanFor(transport, 3, hosts, As::kThreads), groups).Run([rounds](Communicator& c) {
    Memory memory(c.rank());
    for (int round = 0; round < rounds; ++round) {
      AllReduce(c, memory, kFloat, ReduceOp::kSum, {100, 0, 900});
      AllReduce(c, memory, kFloat, ReduceOp::kSum, {7000});
      Gather(c, memory, 300);
    }
  });
}

// One of them fails; the other continues.
void AnotherFails(int rounds) {
  Groups groups(PlanFor("p2p", 2, 1, As::kThreads), 2);
  groups.Run([rounds](Communicator& c) {
    Memory memory(c.rank());
    for (int round = 0; round < rounds; ++round) {
      if (c.name() == "group 0" && round == rounds / 2) break;
      AllReduce(c, memory, kFloat, ReduceOp::kSum, {100});
    }
    if (c.name() != "group 0") return;
    const size_t count = c.rank() == 0 ? 100 : 200;
    ExpectError([&] { AllReduce(c, memory, kFloat, ReduceOp::kSum, {count}); }, Code::kMismatch,
                {"rank 1"});
  });
}

struct Patient : Guard {
  void Check() override {}
};

// A proposed number may still precede a larger one.
void Turns() {
  LaunchOrder order;
  Patient guard;
  const cuda::Uuid first{"first"}, second{"second"};
  LaunchOrder::Turn late(order, second);
  {
    LaunchOrder::Turn early(order, first);
    early.Settle(7);
    ExpectError([&] { early.Await(guard, 0.05); }, Code::kUnavailable, {"has used the GPU"});
    late.Settle(7);
    early.Await(guard, 60);  // of equal numbers, the smaller name is first
    ExpectError([&] { late.Await(guard, 0.05); }, Code::kUnavailable, {"has used the GPU"});
  }
  late.Await(guard, 60);
  EXPECT(LaunchOrder::Turn(order, first).proposed() == 8);
}

}  // namespace
}  // namespace tfdist::testing

int main() {
  using namespace tfdist::testing;
  constexpr int kRounds = 30;
  setenv("FAKE_CUDA_ONE_QUEUE", "1", 1);
  Turns();
  for (const char* transport : {"p2p", "nccl"}) Values(transport, 1, 4, kRounds);
  Values("nccl", 3, 3, kRounds);
  AnotherFails(kRounds);
  return 0;
}
