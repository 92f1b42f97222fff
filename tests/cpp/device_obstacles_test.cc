// Unavailable transports of GPUs: errors, and the warnings of rank 0 about the fallback.
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpp/device_calls.h"

namespace tfdist::testing {
namespace {

void Settings() {
  Plan plan = PlanFor("p2p", 2, 1, As::kThreads);
  Wiring wiring(plan);
  std::vector<Communicator::Setup> setups;
  for (const int rank : {0, 1}) setups.push_back(wiring.Take(rank));
  setups[1].device->transport = "host";
  OnEachThread(std::move(setups), [](Communicator& c) {
    Memory memory;
    ExpectError([&] { AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {40}); },
                Code::kMismatch, {"TFDIST_DEVICE_ALGORITHM", "'p2p'", "'host'"});
  });
  OnEachRank(PlanFor("p2p", 2, 2, As::kThreads), [](Communicator& c) {
    Memory memory;
    ExpectError([&] { AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {40}); },
                Code::kInvalidArgument, {"TFDIST_DEVICE_ALGORITHM=p2p", "several hosts"});
  });
  Plan none = PlanFor("nccl", 2, 1, As::kThreads);
  none.device->nccl = "";
  OnEachRank(none, [](Communicator& c) {
    Memory memory;
    ExpectError([&] { AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {40}); },
                Code::kInvalidArgument, {"TFDIST_DEVICE_ALGORITHM=nccl", "one version of NCCL"});
  });
}

// Processes that share a GPU: its streams cannot wait, or cannot wait for these words.
void WithoutStreams(const Plan& plan) {
  const auto refused = [](const std::vector<std::string>& parts) {
    return [parts](Communicator& c) {
      Memory memory;
      ExpectError([&] { AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {40}); },
                  Code::kInvalidArgument, parts);
    };
  };
  setenv("FAKE_CUDA_NO_STREAM_WAITS", "1", 1);
  OnEachRank(plan, refused({"TFDIST_DEVICE_ALGORITHM=p2p", "two ranks have the same GPU",
                            "rank 0 has no cuStreamWaitValue64"}));
  unsetenv("FAKE_CUDA_NO_STREAM_WAITS");
  OnEachRank(plan, [&refused](Communicator& c) {
    if (c.rank() == 1) FailDriver("cuMemHostRegister_v2", 2);
    refused({"on rank 1, cuMemHostRegister_v2"})(c);
  });
}

// Returns the warnings on ranks 0 and 1, after correct sums. Args: change: changes a rank's setup.
std::vector<std::string> Told(const Plan& plan,
                              const std::function<void(int, DevicePath::Setup&)>& change) {
  Wiring wiring(plan);
  std::vector<Communicator::Setup> setups;
  std::vector<std::string> told(2);
  for (const int rank : {0, 1}) {
    setups.push_back(wiring.Take(rank));
    setups.back().warn = [&told, rank](const std::string& message) { told[rank] += message; };
    change(rank, *setups.back().device);
  }
  OnEachThread(std::move(setups), [](Communicator& c) {
    Memory memory;
    AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {40});
  });
  return told;
}

// Kernels and NCCL would wait for each other: all data pass through the host, and rank 0 warns.
void ASharedGpu() {
  const std::vector<std::string> told =
      Told(PlanFor("", 2, 1, As::kThreads),
           [](int, DevicePath::Setup& setup) { setup.may_share_gpu = false; });
  EXPECT(told[0] ==
         "The GPUs do not access each other's memory, since two ranks have the same GPU. "
         "All-reduces go through the host's memory.");
  EXPECT(told[1].empty());
  Plan plan = PlanFor("p2p", 2, 1, As::kThreads);
  plan.device->may_share_gpu = false;
  OnEachRank(plan, [](Communicator& c) {
    Memory memory;
    ExpectError([&] { AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {40}); },
                Code::kInvalidArgument, {"rank 0 and rank 1, of one process, have the same GPU"});
  });
}

// Each rank has a partition of one GPU, which NCCL refuses.
void PartsOfAGpu() {
  setenv("FAKE_CUDA_PARTS", "1", 1);
  Plan plan = PlanFor("nccl", 2, 1, As::kThreads);
  plan.device->may_share_gpu = false;
  Wiring wiring(plan);
  std::vector<Communicator::Setup> setups;
  for (const int rank : {0, 1}) {
    setups.push_back(wiring.Take(rank));
    setups.back().device->gpus[0].number = rank;
  }
  OnEachThread(std::move(setups), [](Communicator& c) {
    Memory memory;
    ExpectError([&] { AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {40}); },
                Code::kInvalidArgument, {"two ranks have partitions of the same GPU"});
  });
  unsetenv("FAKE_CUDA_PARTS");
}

void BetweenHostsWithoutNccl() {
  const std::vector<std::string> told =
      Told(PlanFor("", 2, 2, As::kThreads), [](int rank, DevicePath::Setup& setup) {
        setup.nccl = rank == 0 ? std::getenv("FAKE_NCCL") : "";
      });
  EXPECT(told[0] ==
         "NCCL is not used, since rank 1 uses none. All-reduces of GPU memory go through the "
         "host's memory.");
  EXPECT(told[1].empty());
}

// One GPU lacks memory for the kernels. Returns the warning of rank 0.
std::string WithoutRoom(const Plan& plan) {
  Wiring wiring(plan);
  Communicator::Setup setups[] = {wiring.Take(0), wiring.Take(1)};
  std::string told[2];
  std::vector<std::unique_ptr<Communicator>> ranks(2);
  for (const size_t rank : {0, 1}) {
    setups[rank].device->nccl = std::getenv("FAKE_NCCL");
    setups[rank].warn = [&told, rank](const std::string& message) { told[rank] += message; };
    FailDriver("cuMemAlloc_v2", rank == 1 ? 2 : 0);
    ranks[rank] = std::make_unique<Communicator>(std::move(setups[rank]));
  }
  FailDriver("cuMemAlloc_v2", 0);
  std::vector<std::thread> threads;
  for (auto& rank : ranks) {
    threads.emplace_back([&rank] {
      Memory memory;
      AllReduce(*rank, memory, DType::kFloat32, ReduceOp::kSum, {40, 3});
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT(told[1].empty());
  EXPECT(told[0].find("on rank 1, 32768 bytes for kernels' buffers cannot be allocated on A GPU of "
                      "threads at 0000:00:00.0; lower TFDIST_DEVICE_BUFFERS, or set "
                      "TF_FORCE_GPU_ALLOW_GROWTH=true: cuMemAlloc_v2 ") != std::string::npos);
  return told[0];
}

void WithoutRoomAnywhere() {
  const std::string in_a_host = WithoutRoom(PlanFor("", 2, 1, As::kThreads));
  EXPECT(in_a_host.find("The GPUs do not access each other's memory, since on rank 1, ") == 0);
  EXPECT(in_a_host.find("(CUDA_ERROR_OUT_OF_MEMORY). All-reduces go through NCCL.") !=
         std::string::npos);
  for (const Plan& plan : {PlanFor("", 2, 2, As::kThreads), PlanFor("nccl", 2, 1, As::kThreads)}) {
    const std::string told = WithoutRoom(plan);
    EXPECT(told.find("NCCL reduces each small tensor separately, since on rank 1, ") == 0);
  }
}

void UnlikeGpus() {
  setenv("FAKE_CUDA_MODELS", "1", 1);
  const auto number = [](int rank, DevicePath::Setup& setup) { setup.gpus[0].number = rank; };
  const std::vector<std::string> told = Told(PlanFor("", 2, 1, As::kThreads), number);
  EXPECT(told[0] ==
         "The GPUs are of different models: rank 0 has A GPU of threads 0, and rank 1 "
         "has A GPU of threads 1. Each step takes as long as on the slowest.");
  EXPECT(told[1].empty());
  unsetenv("FAKE_CUDA_MODELS");
  for (const std::string& text : Told(PlanFor("", 2, 1, As::kThreads), number)) {
    EXPECT(text.empty());
  }
}

// As in containers that isolate processes.
void WithoutIpc(const Plan& plan) {
  OnEachProcess(plan, -1, [](Communicator& c) {
    Memory memory;
    if (c.rank() == 1) FailDriver("cuIpcOpenMemHandle_v2", 1);
    ExpectError(
        [&] { AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {40}); },
        Code::kInvalidArgument,
        {"TFDIST_DEVICE_ALGORITHM=p2p", "on rank 1, cuIpcOpenMemHandle_v2 of the GPU's driver",
         "(--ipc=host --pid=host)."});
  });
}

void UnlikeNccl(const Plan& plan) {
  OnEachProcess(plan, -1, [](Communicator& c) {
    Memory memory;
    setenv("FAKE_NCCL_VERSION", c.rank() == 1 ? "22703" : "22105", 1);
    ExpectError([&] { AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {40}); },
                Code::kInvalidArgument,
                {"TFDIST_DEVICE_ALGORITHM=nccl", "rank 0 has 2.21.5, and rank 1 has 2.27.3."});
  });
}

// NCCL shares a GPU if all ranks allow it.
void SharedByNccl(Plan plan) {
  plan.device->may_share_gpu = false;
  const auto set = [] {
    setenv("FAKE_NCCL_VERSION", "23007", 1);
    setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  };
  OnEachProcess(plan, -1, [&](Communicator& c) {
    Memory memory;
    set();
    AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {40});
  });
  OnEachProcess(plan, -1, [&](Communicator& c) {
    Memory memory;
    if (c.rank() == 0) set();
    ExpectError([&] { AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {40}); },
                Code::kInvalidArgument, {"two ranks have the same GPU"});
  });
}

void WithFakes() {
  // Processes come first, since none may have a driver before it forks.
  WithoutIpc(PlanFor("p2p", 2, 1, As::kProcesses));
  UnlikeNccl(PlanFor("nccl", 2, 1, As::kProcesses));
  SharedByNccl(PlanFor("nccl", 2, 1, As::kProcesses));
  WithoutStreams(PlanForStreams(3, As::kProcesses));
  Settings();
  ASharedGpu();
  PartsOfAGpu();
  BetweenHostsWithoutNccl();
  WithoutRoomAnywhere();
  UnlikeGpus();
}

}  // namespace
}  // namespace tfdist::testing

int main() {
  using namespace tfdist::testing;
  return Report(FakeDriver().empty() ? ASharedGpu : WithFakes);
}
