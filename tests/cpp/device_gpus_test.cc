// Collectives of processes with several GPUs each: values by each transport, and failures of single
// GPUs.
#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "cpp/gpu_parts.h"

namespace tfdist::testing {
namespace {

constexpr DType kFloat = DType::kFloat32;

// Args: counts: the number of values of each GPU.
void AllReduce(Gpus& gpus, DType type, ReduceOp op, const std::vector<size_t>& counts) {
  gpus.Clear();
  std::vector<Operation> parts;
  std::vector<cuda::Address> places;
  for (size_t gpu = 0; gpu < gpus.size(); ++gpu) {
    const std::vector<char> values = Fill(type, counts[gpu], gpus.Rank(gpu));
    places.push_back(gpus[gpu].Put(values));
    parts.push_back(OnDevice(gpus[gpu], Kind::kAllReduce, type, op, "gradients"));
    parts.back().fingerprint.AddShape({static_cast<int64_t>(counts[gpu])});
    parts.back().in = ConstBufferList(Pointer(places.back()), values.size());
    parts.back().out = BufferList(Pointer(places.back()), values.size());
  }
  RunParts(gpus.communicator, std::move(parts));
  for (size_t gpu = 0; gpu < gpus.size(); ++gpu) {
    const int all = gpus.communicator.participants();
    EXPECT(gpus[gpu].Has(places[gpu], Expected(type, op, all, counts[gpu])));
  }
}

void AllReduce(Gpus& gpus, DType type, ReduceOp op, size_t count) {
  AllReduce(gpus, type, op, std::vector<size_t>(gpus.size(), count));
}

void Broadcasts(Gpus& gpus) {
  for (int root = 0; root < gpus.communicator.participants(); ++root) {
    gpus.Clear();
    std::vector<Operation> parts;
    std::vector<cuda::Address> places;
    for (size_t gpu = 0; gpu < gpus.size(); ++gpu) {
      const std::vector<char> values = Fill(kFloat, 700, gpus.Rank(gpu));
      places.push_back(gpus[gpu].Put(values));
      parts.push_back(OnDevice(gpus[gpu], Kind::kBroadcast, kFloat, ReduceOp::kSum, "value"));
      parts.back().fingerprint.root = root;
      parts.back().in = ConstBufferList(Pointer(places.back()), values.size());
      parts.back().out = BufferList(Pointer(places.back()), values.size());
    }
    RunParts(gpus.communicator, std::move(parts));
    for (size_t gpu = 0; gpu < gpus.size(); ++gpu) {
      EXPECT(gpus[gpu].Has(places[gpu], Fill(kFloat, 700, root)));
    }
  }
}

// Args: rows: the number of rows by a GPU's number among all GPUs.
void Gathers(Gpus& gpus, const std::function<size_t(int)>& rows) {
  gpus.Clear();
  std::vector<Operation> parts;
  std::vector<cuda::Address> places(gpus.size());
  for (size_t gpu = 0; gpu < gpus.size(); ++gpu) {
    const std::vector<char> values = Fill(kFloat, rows(gpus.Rank(gpu)), gpus.Rank(gpu));
    char* const at = Pointer(gpus[gpu].Put(values));
    parts.push_back(OnDevice(gpus[gpu], Kind::kAllGather, kFloat, ReduceOp::kSum, "rows"));
    parts.back().in = ConstBufferList(at, values.size());
    parts.back().row_bytes = 4;
    parts.back().sent_rows = {values.size() / 4};
    parts.back().allocate = [&gpus, &places, gpu](const std::vector<size_t>& all) {
      const size_t total = std::accumulate(all.begin(), all.end(), size_t{0}) * 4;
      places[gpu] = gpus[gpu].Take(total);
      return BufferList(Pointer(places[gpu]), total);
    };
  }
  RunParts(gpus.communicator, std::move(parts));
  std::vector<char> expected;
  for (int rank = 0; rank < gpus.communicator.participants(); ++rank) {
    const std::vector<char> part = Fill(kFloat, rows(rank), rank);
    expected.insert(expected.end(), part.begin(), part.end());
  }
  for (size_t gpu = 0; gpu < gpus.size(); ++gpu) EXPECT(gpus[gpu].Has(places[gpu], expected));
}

void Scatters(Gpus& gpus, ReduceOp op) {
  constexpr size_t kCount = 300;
  gpus.Clear();
  const int all = gpus.communicator.participants();
  std::vector<Operation> parts;
  std::vector<cuda::Address> places;
  for (size_t gpu = 0; gpu < gpus.size(); ++gpu) {
    const std::vector<char> values =
        Fill(kFloat, kCount * static_cast<size_t>(all), gpus.Rank(gpu));
    char* const at = Pointer(gpus[gpu].Put(values));
    places.push_back(gpus[gpu].Take(kCount * 4));
    parts.push_back(OnDevice(gpus[gpu], Kind::kReduceScatter, kFloat, op, "parts"));
    parts.back().in = ConstBufferList(at, values.size());
    parts.back().out = BufferList(Pointer(places.back()), kCount * 4);
  }
  RunParts(gpus.communicator, std::move(parts));
  for (size_t gpu = 0; gpu < gpus.size(); ++gpu) {
    const size_t offset = kCount * static_cast<size_t>(gpus.Rank(gpu));
    EXPECT(gpus[gpu].Has(places[gpu], Expected(kFloat, op, all, kCount, offset)));
  }
}

void Values(Communicator& c) {
  Gpus gpus(c);
  for (const DType type : {kFloat, DType::kInt64, DType::kBool}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) AllReduce(gpus, type, op, 5000);
  }
  AllReduce(gpus, kFloat, ReduceOp::kMean, 37);
  AllReduce(gpus, kFloat, ReduceOp::kSum, size_t{0});
  AllReduce(gpus, kFloat, ReduceOp::kSum, 100'000);
  Broadcasts(gpus);
  Gathers(gpus, [](int) { return 50; });
  Gathers(gpus, [](int rank) { return static_cast<size_t>(rank) * 7; });
  Gathers(gpus, [](int) { return 0; });
  Scatters(gpus, ReduceOp::kSum);
  Scatters(gpus, ReduceOp::kMean);
}

// Several chunks.
void Large(Communicator& c) {
  Gpus gpus(c);
  AllReduce(gpus, kFloat, ReduceOp::kSum, 2'500'000);
}

// The GPUs of one process pass different tensors.
void UnlikeParts(const Plan& plan) {
  OnEachRank(plan, [](Communicator& c) {
    Gpus gpus(c);
    ExpectError([&] { AllReduce(gpus, kFloat, ReduceOp::kSum, std::vector<size_t>{40, 41}); },
                Code::kMismatch, {"GPU 0 is in", "float32[40]", "GPU 1 is in", "float32[41]"});
  });
}

// An invalid root; the group continues.
void BadRoot(const Plan& plan) {
  OnEachRank(plan, [](Communicator& c) {
    Gpus gpus(c);
    std::vector<Operation> parts;
    for (size_t gpu = 0; gpu < gpus.size(); ++gpu) {
      char* const data = Pointer(gpus[gpu].Put(Fill(kFloat, 9, 0)));
      parts.push_back(OnDevice(gpus[gpu], Kind::kBroadcast, kFloat, ReduceOp::kSum, "value"));
      parts.back().fingerprint.root = c.participants();
      parts.back().in = ConstBufferList(data, 36);
      parts.back().out = BufferList(data, 36);
    }
    ExpectError([&] { RunParts(c, std::move(parts)); }, Code::kInvalidArgument,
                {"The root must be one of the group's"});
    AllReduce(gpus, kFloat, ReduceOp::kSum, 40);
  });
}

// Buffers of different sizes: NCCL's calls are divided identically anyway.
void UnlikeBuffers() {
  const Plan plan = WithGpus("nccl", 2, 2, As::kThreads, 2);
  Wiring wiring(plan);
  std::vector<Communicator::Setup> setups;
  for (const int rank : {0, 1}) setups.push_back(wiring.Take(rank));
  setups[1].device->buffer_bytes = 4096;
  OnEachThread(std::move(setups), [](Communicator& c) {
    for (const size_t count : {700u, 1500u}) {
      Gpus gpus(c);
      std::vector<Operation> parts;
      std::vector<std::vector<cuda::Address>> places(gpus.size());
      for (size_t gpu = 0; gpu < gpus.size(); ++gpu) {
        std::vector<BasicBuffer<char>> buffers;
        for (size_t tensor = 0; tensor < 6; ++tensor) {
          const std::vector<char> values = Fill(kFloat, count, gpus.Rank(gpu), tensor);
          places[gpu].push_back(gpus[gpu].Put(values));
          buffers.push_back({Pointer(places[gpu].back()), values.size()});
        }
        parts.push_back(OnDevice(gpus[gpu], Kind::kAllReduce, kFloat, ReduceOp::kSum, "x"));
        parts.back().out = BufferList(buffers);
        parts.back().in = parts.back().out.Const();
      }
      RunParts(c, std::move(parts));
      for (size_t gpu = 0; gpu < gpus.size(); ++gpu) {
        for (size_t tensor = 0; tensor < 6; ++tensor) {
          EXPECT(gpus[gpu].Has(places[gpu][tensor],
                               Expected(kFloat, ReduceOp::kSum, c.participants(), count, tensor)));
        }
      }
    }
  });
}

// The first all-reduce measures which transport is faster.
void Measured() {
  Plan plan = WithGpus("", 1, 1, As::kThreads, 2);
  plan.device->nccl = Environment("FAKE_NCCL");
  OnEachRank(plan, [](Communicator& c) {
    Gpus gpus(c);
    for (const size_t count : {40u, 100'000u, 7u}) AllReduce(gpus, kFloat, ReduceOp::kSum, count);
  });
}

// A GPU that never joins an operation.
void MissingPart(Plan plan) {
  plan.timeout_seconds = 0.5;
  OnEachRank(plan, [](Communicator& c) {
    Gpus gpus(c);
    Operation part = OnDevice(gpus[1], Kind::kAllReduce, kFloat, ReduceOp::kSum, "gradients");
    ExpectError([&] { RunPart(c, 1, std::move(part)); }, Code::kUnavailable,
                {"GPU 0 of this process has not joined all_reduce 'gradients'", "GPU 1"});
  });
}

// A GPU does not join, since its step was aborted. Both GPUs join the next step.
void GivenUp(const Plan& plan) {
  OnEachRank(plan, [](Communicator& c) {
    Gpus gpus(c);
    Operation part = OnDevice(gpus[1], Kind::kAllReduce, kFloat, ReduceOp::kSum, "gradients");
    part.cancellation = std::make_shared<Cancellation>();
    part.cancellation->Ask();
    ExpectError([&] { RunPart(c, 1, std::move(part)); }, Code::kCancelled,
                {"has given up its step"});
    AllReduce(gpus, kFloat, ReduceOp::kSum, 40);
  });
}

void Messages(const Plan& plan) {
  OnEachRank(plan, [](Communicator& c) {
    Gpus gpus(c);
    std::vector<Operation> parts;
    for (size_t gpu = 0; gpu < gpus.size(); ++gpu) {
      parts.push_back(OnDevice(gpus[gpu], Kind::kAllToAll, kFloat, ReduceOp::kSum, "rows"));
    }
    ExpectError([&] { RunParts(c, std::move(parts)); }, Code::kInvalidArgument,
                {"all_to_all", "Start one process per GPU."});
  });
}

void UnlikeNumbers() {
  const Plan plan = WithGpus("", 2, 1, As::kThreads, 2);
  Wiring wiring(plan);
  std::vector<Communicator::Setup> setups;
  for (const int rank : {0, 1}) setups.push_back(wiring.Take(rank));
  setups[1].device->gpus.push_back({2, "/dev/null"});
  OnEachThread(std::move(setups), [](Communicator& c) {
    Gpus gpus(c);
    ExpectError(
        [&] { AllReduce(gpus, kFloat, ReduceOp::kSum, 40); }, Code::kMismatch,
        {"All workers must have the same number of GPUs. Received: 2 on rank 0, 3 on rank 1."});
  });
}

// The driver does not allow access between the GPUs.
void OutOfReach() {
  setenv("FAKE_CUDA_LINKS", "0-1:cut", 1);
  Plan plan = WithGpus("", 1, 1, As::kThreads, 2);
  plan.device->may_share_gpu = false;
  Wiring wiring(plan);
  std::vector<Communicator::Setup> setups;
  setups.push_back(wiring.Take(0));
  std::string told;
  setups[0].warn = [&told](const std::string& message) { told += message; };
  OnEachThread(std::move(setups), [](Communicator& c) {
    Gpus gpus(c);
    AllReduce(gpus, kFloat, ReduceOp::kSum, 40);
  });
  EXPECT(told.find("The GPUs do not access each other's memory, since on rank 0, its GPU 1 cannot "
                   "be accessed by A GPU of threads") == 0);
  unsetenv("FAKE_CUDA_LINKS");
}

void Lost(const Plan& plan) {
  OnEachProcess(plan, 1, [](Communicator& c) {
    Gpus gpus(c);
    const auto steps = [&] {
      for (int round = 0;; ++round) {
        if (c.rank() == 1 && round == 3) raise(SIGKILL);
        AllReduce(gpus, kFloat, ReduceOp::kSum, 5000);
      }
    };
    ExpectError(steps, Code::kUnavailable, {"rank 1"});
  });
}

void All() {
  // Processes come first, since none may have a driver before it forks.
  for (const char* const transport : {"p2p", "nccl", "host"}) {
    OnEachRank(WithGpus(transport, 2, 1, As::kProcesses, 2), Values);
    Lost(WithGpus(transport, 3, 1, As::kProcesses, 2));
  }
  // Each GPU is shared by a rank of either process, so the streams wait.
  Plan shared = WithGpus("p2p", 2, 1, As::kProcesses, 2);
  shared.device->may_share_gpu = false;
  OnEachRank(shared, Values);
  Lost(shared);
  for (const char* const transport : {"p2p", "nccl", "host"}) {
    OnEachRank(WithGpus(transport, 1, 1, As::kThreads, 3), Values);
    UnlikeParts(WithGpus(transport, 2, 1, As::kThreads, 2));
  }
  for (const char* const transport : {"nccl", "host"}) {
    OnEachRank(WithGpus(transport, 2, 2, As::kThreads, 2), Values);
  }
  OnEachRank(WithGpus("host", 2, 1, As::kThreads, 2), Large);
  MissingPart(WithGpus("", 1, 1, As::kThreads, 2));
  GivenUp(WithGpus("", 2, 1, As::kThreads, 2));
  Messages(WithGpus("", 1, 1, As::kThreads, 2));
  for (const char* const transport : {"nccl", "host"}) {
    BadRoot(WithGpus(transport, 2, 1, As::kThreads, 2));
  }
  UnlikeBuffers();
  Measured();
  UnlikeNumbers();
  OutOfReach();
}

// One process with all real GPUs.
void OnGpus() {
  int count = 0;
  cuda::Check(cuda::Load().cuDeviceGetCount(&count), "cuDeviceGetCount");
  for (const char* const transport : {"p2p", "nccl", "host", ""}) {
    OnEachRank(WithGpus(transport, 1, 1, As::kThreads, std::min(count, 8)), Values);
  }
}

}  // namespace
}  // namespace tfdist::testing

int main() {
  using namespace tfdist::testing;
  return Report(FakeDriver().empty() ? OnGpus : All);
}
