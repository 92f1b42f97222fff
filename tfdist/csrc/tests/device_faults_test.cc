// Collectives of memory on a GPU of which one goes wrong: other calls, other settings, a rank that is
// lost or cannot go on, a GPU that several ranks have.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/device_team.h"
#include "tests/nccl_team.h"

namespace tfdist::testing {
namespace {

void Mismatches(const Plan& plan) {
  OnEachRank(plan, [](Communicator& c) {
    Memory memory;
    AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {40});
    ExpectError(
        [&] { AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {c.rank() ? 9u : 40u}); },
        Code::kMismatch, {"The ranks do not call the same collectives in the same order"});
  });
  OnEachRank(plan, [](Communicator& c) {
    Memory memory;
    const auto reduce = [&] {
      if (c.rank() == 1) return Do(c, Kind::kAllReduce, 40, "gradients");
      AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {40});
    };
    ExpectError(reduce, Code::kMismatch, {"It is on a GPU on one of them alone."});
  });
}

// A rank is lost while the others' GPUs work on what they have only launched, and its memory is theirs to
// read. What is next, or waits, says so.
void LostBesides(const Plan& plan) {
  OnEachProcess(plan, 1, [](Communicator& c) {
    Memory memory;
    const auto launch = [&] { Launch(c, memory, 9000); };
    const auto await = [&] { AwaitLaunched(c, memory); };
    const auto steps = [&] {
      for (int round = 0;; ++round) {
        launch();
        if (c.rank() == 1 && round == 3) raise(SIGKILL);
        launch();
        await();
      }
    };
    ExpectError(steps, Code::kUnavailable, {"rank 1"});
    ExpectError(await, Code::kUnavailable, {"rank 1"});
  });
}

// One rank sends what the other one does not expect, or is lost.
void Messages(const Plan& plan) {
  const auto pass = [](Communicator& c, Memory& memory, size_t count) {
    memory.Clear();
    const std::vector<char> values = Fill(DType::kFloat32, count, 1);
    const cuda::Address at = memory.Put(values);
    const bool sends = c.rank() == 1;
    Operation message = OnDevice(memory, sends ? Kind::kSend : Kind::kReceive, DType::kFloat32,
                                 ReduceOp::kSum, "message");
    message.fingerprint.AddShape({static_cast<int64_t>(count)});
    message.peer = 1 - c.rank();
    if (sends) message.in = ConstPieces(Pointer(at), values.size());
    if (!sends) message.out = Pieces(Pointer(at), values.size());
    c.Run(std::move(message));
  };
  const bool on_host = plan.device->transport == "host";
  OnEachRank(plan, [&pass, on_host](Communicator& c) {
    Memory memory;
    pass(c, memory, 9000);
    if (on_host) return;  // The sender may be gone before the other one comes.
    ExpectError([&] { pass(c, memory, c.rank() ? 0 : 40); }, Code::kMismatch,
                {"The ranks do not call the same collectives in the same order"});
  });
  OnEachProcess(plan, 1, [&pass](Communicator& c) {
    Memory memory;
    const auto steps = [&] {
      for (int round = 0;; ++round) {
        if (c.rank() == 1 && round == 3) raise(SIGKILL);
        pass(c, memory, 9000);
      }
    };
    ExpectError(steps, Code::kUnavailable, {"rank 1"});
  });
}

void Settings() {
  Plan plan = PlanFor("own", 2, 1, As::kThreads);
  Wiring wiring(plan);
  std::vector<Communicator::Setup> setups;
  for (const int rank : {0, 1}) setups.push_back(wiring.Take(rank));
  setups[1].device->transport = "host";
  OnEachThread(std::move(setups), [](Communicator& c) {
    Memory memory;
    ExpectError([&] { AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {40}); },
                Code::kMismatch, {"TFDIST_DEVICE_ALGORITHM", "'own'", "'host'"});
  });
  OnEachRank(PlanFor("own", 2, 2, As::kThreads), [](Communicator& c) {
    Memory memory;
    ExpectError([&] { AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {40}); },
                Code::kInvalidArgument, {"TFDIST_DEVICE_ALGORITHM=own", "several hosts"});
  });
  Plan none = PlanFor("nccl", 2, 1, As::kThreads);
  none.device->nccl = "";
  OnEachRank(none, [](Communicator& c) {
    Memory memory;
    ExpectError([&] { AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {40}); },
                Code::kInvalidArgument, {"TFDIST_DEVICE_ALGORITHM=nccl", "one version of NCCL"});
  });
}

// One rank brings nothing, or a reduction that there is none of; the next operation finds both again.
void Refusals(const Plan& plan) {
  OnEachRank(plan, [](Communicator& c) {
    Memory memory;
    ExpectError([&] { AllReduce(c, memory, DType::kInt32, ReduceOp::kMean, {40}); },
                Code::kInvalidArgument, {"mean"});
    AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {40});
    std::vector<size_t> counts{40};
    if (c.rank() == 1) counts[0] = 0;
    ExpectError([&] { AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, counts); },
                Code::kMismatch, {"The ranks do not call the same collectives in the same order"});
  });
  // The same values, cut otherwise.
  OnEachRank(plan, [](Communicator& c) {
    Memory memory;
    const std::vector<size_t> cut = c.rank() ? std::vector<size_t>{30, 10}
                                             : std::vector<size_t>{20, 20};
    const auto reduce = [&] { AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, cut); };
    ExpectError(reduce, Code::kMismatch, {"The shapes differ."});
  });
}

// What is left of a group may use its GPU.
void ExpectThatTheGpuWorksOn() {
  const GpuTeam alone = MakeGpuTeam(1);
  EXPECT(alone[0]->Reduces(DType::kFloat32, ReduceOp::kSum, {3000, 5}, 0, 1));
}

void Lost(const Plan& plan) {
  OnEachProcess(plan, 1, [](Communicator& c) {
    Memory memory;
    const auto steps = [&] {
      for (int round = 0;; ++round) {
        if (c.rank() == 1 && round == 3) raise(SIGKILL);
        AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {5000, 3});
      }
    };
    ExpectError(steps, Code::kUnavailable, {"rank 1"});
    ExpectThatTheGpuWorksOn();
  });
}

// A rank stands still, and its process lives on with all that it has on the GPU.
void Stopped(Plan plan) {
  plan.silence_warning_seconds = plan.silence_timeout_seconds = 5;
  auto* const stopped = static_cast<std::atomic<pid_t>*>(
      mmap(nullptr, sizeof(pid_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  OnEachProcess(plan, 1, [stopped](Communicator& c) {
    Memory memory;
    const auto steps = [&] {
      for (int round = 0;; ++round) {
        if (c.rank() == 1 && round == 3) {
          *stopped = getpid();
          raise(SIGSTOP);
        }
        AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {5000, 3});
      }
    };
    ExpectError(steps, Code::kUnavailable, {"rank 1 is lost"});
    ExpectThatTheGpuWorksOn();
    if (c.rank() == 0) kill(*stopped, SIGKILL);  // so that it ends, too
  });
  munmap(stopped, sizeof(pid_t));
}

// A rank finds no room on its GPU for what the others send, who are told.
void WithoutMemory(const Plan& plan) {
  OnEachProcess(plan, -1, [](Communicator& c) {
    Memory memory;
    AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {5000});
    memory.Clear();
    const Gpu gpu(0);
    const std::vector<char> own = Fill(DType::kFloat32, 700, c.rank());
    Operation gather = OnDevice(memory, Kind::kAllGather, DType::kFloat32, ReduceOp::kSum, "gather");
    gather.row_bytes = 4;
    gather.sent_rows = {700};
    gather.in = ConstPieces(Pointer(memory.Put(own)), own.size());
    gather.allocate = [&](const std::vector<size_t>& rows) {
      if (c.rank() == 1) DeviceMemory(gpu, size_t{1} << 50);
      const size_t bytes = rows.size() * own.size();
      return Pieces(Pointer(memory.Take(bytes)), bytes);
    };
    ExpectError([&] { c.Run(std::move(gather)); }, Code::kInternal,
                {"cuMemAlloc_v2 of the GPU's driver has failed: out of memory"});
    ExpectThatTheGpuWorksOn();
  });
}

// A rank has arrived and then cannot launch, while the others wait on their GPUs.
void Broken(const Plan& plan) {
  OnEachProcess(plan, -1, [](Communicator& c) {
    Memory memory;
    AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {5000});
    if (c.rank() == 1) {
      FailDriver("cuLaunchKernel", 2);
    }
    ExpectError([&] { AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {5000}); },
                Code::kInternal, {"cuLaunchKernel of the GPU's driver has failed: out of memory"});
  });
}

// At the end, one rank has stopped before it says farewell.
void LeftAlone(const Plan& plan) {
  auto* const stopped = static_cast<std::atomic<pid_t>*>(
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  OnEachProcess(plan, 1, [stopped](Communicator& c) {
    Memory memory;
    AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {5000, 3});
    if (c.rank() == 1) {
      *stopped = getpid();
      raise(SIGSTOP);
    }
    c.Close();
    kill(*stopped, SIGKILL);
  });
  munmap(stopped, 4096);
}

// A rank's GPU gets stuck after it has told the others that it has come, and its host lives on.
void Stuck(Plan plan) {
  plan.timeout_seconds = 5;
  OnEachProcess(plan, -1, [](Communicator& c) {
    Memory memory;
    AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {5000});
    memory.Clear();
    const std::vector<char> values = Fill(DType::kFloat32, 5000, c.rank());
    char* const at = Pointer(memory.Put(values));
    Operation operation = OnDevice(memory, Kind::kAllReduce, DType::kFloat32, ReduceOp::kSum, "x");
    operation.in = ConstPieces(at, values.size());
    operation.out = Pieces(at, values.size());
    const auto run = [&] { c.Run(std::move(operation)); };
    if (c.rank() == 0) {
      return ExpectError(run, Code::kUnavailable, {"though all ranks have joined it"});
    }
    setenv("FAKE_CUDA_LINKS", "0--1:stuck", 1);
    try {
      run();
    } catch (const Error& error) {
      _exit(error.code() != Code::kUnavailable);
    }
    _exit(1);  // Nothing but its end frees what is stuck.
  });
}

// Processes with one GPU whose streams cannot wait, or not by these words.
void WithoutStreams(const Plan& plan) {
  const auto refused = [](const std::vector<std::string>& parts) {
    return [parts](Communicator& c) {
      Memory memory;
      ExpectError([&] { AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {40}); },
                  Code::kInvalidArgument, parts);
    };
  };
  setenv("FAKE_CUDA_NO_STREAM_WAITS", "1", 1);
  OnEachRank(plan, refused({"TFDIST_DEVICE_ALGORITHM=own", "two ranks have the same GPU",
                            "rank 0 has no cuStreamWaitValue64"}));
  unsetenv("FAKE_CUDA_NO_STREAM_WAITS");
  OnEachRank(plan, [&refused](Communicator& c) {
    if (c.rank() == 1) FailDriver("cuMemHostRegister_v2", 2);
    refused({"on rank 1, cuMemHostRegister_v2"})(c);
  });
}

// What ranks 0 and 1 are told, where the sums are right. Args: changes a rank's setup.
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

// Kernels and NCCL would wait for each other: all goes through the host, and rank 0 says so.
void ASharedGpu() {
  const std::vector<std::string> told =
      Told(PlanFor("", 2, 1, As::kThreads),
           [](int, DevicePath::Setup& setup) { setup.may_share_gpu = false; });
  EXPECT(told[0] == "No GPU reads another one's memory, since two ranks have the same GPU. "
                    "All-reduces go through the host's memory.");
  EXPECT(told[1].empty());
  Plan plan = PlanFor("own", 2, 1, As::kThreads);
  plan.device->may_share_gpu = false;
  OnEachRank(plan, [](Communicator& c) {
    Memory memory;
    ExpectError([&] { AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {40}); },
                Code::kInvalidArgument, {"rank 0 and rank 1, of one process, have the same GPU"});
  });
}

// Each has a part of one GPU, which NCCL refuses.
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
                Code::kInvalidArgument, {"two ranks have parts of the same GPU"});
  });
  unsetenv("FAKE_CUDA_PARTS");
}

void BetweenHostsWithoutNccl() {
  const std::vector<std::string> told =
      Told(PlanFor("", 2, 2, As::kThreads), [](int rank, DevicePath::Setup& setup) {
        setup.nccl = rank == 0 ? std::getenv("FAKE_NCCL") : "";
      });
  EXPECT(told[0] == "NCCL is not used, since rank 1 uses none. All-reduces of what is on GPUs go "
                    "through the host's memory.");
  EXPECT(told[1].empty());
}

// One GPU has no room for what kernels need; rank 0 says so. Returns what it says.
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
  EXPECT(told[0].find("on rank 1, 32768 bytes for kernels' buffers cannot be had on A GPU of "
                      "threads at 0000:00:00.0; lower TFDIST_DEVICE_BUFFERS, or set "
                      "TF_FORCE_GPU_ALLOW_GROWTH=true: cuMemAlloc_v2 ") != std::string::npos);
  return told[0];
}

void WithoutRoomAnywhere() {
  const std::string in_a_host = WithoutRoom(PlanFor("", 2, 1, As::kThreads));
  EXPECT(in_a_host.find("No GPU reads another one's memory, since on rank 1, ") == 0);
  EXPECT(in_a_host.find("(CUDA_ERROR_OUT_OF_MEMORY). All-reduces go through NCCL.") !=
         std::string::npos);
  for (const Plan& plan : {PlanFor("", 2, 2, As::kThreads), PlanFor("nccl", 2, 1, As::kThreads)}) {
    const std::string told = WithoutRoom(plan);
    EXPECT(told.find("Each small tensor goes through NCCL by itself, since on rank 1, ") == 0);
  }
}

void UnlikeGpus() {
  setenv("FAKE_CUDA_MODELS", "1", 1);
  const auto number = [](int rank, DevicePath::Setup& setup) { setup.gpus[0].number = rank; };
  const std::vector<std::string> told = Told(PlanFor("", 2, 1, As::kThreads), number);
  EXPECT(told[0] == "The GPUs are of different models: rank 0 has A GPU of threads 0, and rank 1 "
                    "has A GPU of threads 1. Each step takes as long as on the slowest.");
  EXPECT(told[1].empty());
  unsetenv("FAKE_CUDA_MODELS");
  for (const std::string& text : Told(PlanFor("", 2, 1, As::kThreads), number)) {
    EXPECT(text.empty());
  }
}

// As in containers that keep processes apart.
void WithoutIpc(const Plan& plan) {
  OnEachProcess(plan, -1, [](Communicator& c) {
    Memory memory;
    if (c.rank() == 1) FailDriver("cuIpcOpenMemHandle_v2", 1);
    ExpectError([&] { AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {40}); },
                Code::kInvalidArgument,
                {"TFDIST_DEVICE_ALGORITHM=own", "on rank 1, cuIpcOpenMemHandle_v2 of the GPU's driver",
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

// NCCL fails on one rank alone, as it is called or when all have launched: all are told, and the
// next group works.
void NcclFails(const Plan& plan, bool later) {
  constexpr int kSystem = 2;
  const char* const what = later ? "error" : "ncclAllReduce";
  Wiring next(plan);
  OnEachProcess(plan, -1, [&](Communicator& c) {
    Memory memory;
    AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {5000});
    const bool fails = c.rank() == 1;
    if (fails && !later) Set(what, kSystem);
    const auto steps = [&] {
      for (;;) {
        Launch(c, memory, 5000);
        if (fails && later) Set(what, kSystem);
        AwaitLaunched(c, memory);
      }
    };
    const std::string where = later ? "The communicator" : what;
    ExpectError(steps, Code::kInternal, {where + " of NCCL 2.21.5 has failed: system error"});
    if (fails) Set(what, 0);
    Communicator after(next.Take(c.rank()));
    AllReduce(after, memory, DType::kFloat32, ReduceOp::kSum, {5000});
  });
}

void WithFakes() {
  // Processes first: none has a driver before it forks.
  std::vector<std::function<void()>> stops;
  for (const char* const transport : {"own", "nccl", "host"}) {
    Lost(PlanFor(transport, 3, 1, As::kProcesses));
    WithoutMemory(PlanFor(transport, 3, 1, As::kProcesses));
    stops.push_back([=] { Stopped(PlanFor(transport, 3, 1, As::kProcesses)); });
  }
  // In two parts: under the thread sanitizer a process takes more than a gigabyte.
  InParallel(stops);
  const Plan streams = PlanForStreams(3, As::kProcesses);
  InParallel({[=] { Stopped(streams); }, [] { LeftAlone(PlanForStreams(2, As::kProcesses)); },
              [] { Stuck(PlanForStreams(2, As::kProcesses)); }});
  for (const char* const transport : {"own", "nccl", "host"}) {
    Messages(PlanFor(transport, 2, 1, As::kProcesses));
    LostBesides(PlanFor(transport, 3, 1, As::kProcesses));
  }
  Broken(PlanFor("own", 3, 1, As::kProcesses));
  WithoutIpc(PlanFor("own", 2, 1, As::kProcesses));
  UnlikeNccl(PlanFor("nccl", 2, 1, As::kProcesses));
  Lost(streams);
  LostBesides(streams);
  Broken(streams);
  Messages(PlanForStreams(2, As::kProcesses));
  WithoutStreams(streams);
  for (const bool later : {false, true}) NcclFails(PlanFor("nccl", 3, 1, As::kProcesses), later);
  for (const char* const transport : {"own", "nccl", "host"}) {
    Mismatches(PlanFor(transport, 2, 1, As::kThreads));
  }
  for (const char* const transport : {"own", "nccl"}) {
    Refusals(PlanFor(transport, 2, 1, As::kThreads));
  }
  Mismatches(PlanForStreams(2, As::kThreads));
  Refusals(PlanForStreams(2, As::kThreads));
  Settings();
  ASharedGpu();
  PartsOfAGpu();
  BetweenHostsWithoutNccl();
  WithoutRoomAnywhere();
  UnlikeGpus();
}

void OnAGpu() {
  for (const char* const transport : {"own", "host"}) {
    Lost(PlanFor(transport, 3, 1, As::kProcesses));
    Stopped(PlanFor(transport, 3, 1, As::kProcesses));
    WithoutMemory(PlanFor(transport, 3, 1, As::kProcesses));
    Messages(PlanFor(transport, 2, 1, As::kProcesses));
    LostBesides(PlanFor(transport, 3, 1, As::kProcesses));
  }
  if (!Environment("NCCL_RANKS").empty()) {  // One that lets two ranks share a GPU.
    Lost(PlanFor("nccl", 2, 1, As::kProcesses));
    Stopped(PlanFor("nccl", 2, 1, As::kProcesses));
    LostBesides(PlanFor("nccl", 2, 1, As::kProcesses));
  }
  Lost(PlanForStreams(3, As::kProcesses));
  LostBesides(PlanForStreams(3, As::kProcesses));
  Mismatches(PlanFor("own", 2, 1, As::kThreads));
  ASharedGpu();
}

}  // namespace
}  // namespace tfdist::testing

int main() {
  using namespace tfdist::testing;
  return Report(FakeDriver().empty() ? OnAGpu : WithFakes);
}
