// Failures of collectives of GPU memory: mismatched calls, and ranks that are lost or cannot
// continue.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "cpp/device_calls.h"
#include "cpp/nccl_threads.h"

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
    ExpectError(reduce, Code::kMismatch, {"Only one of them uses a GPU."});
  });
}

// A rank is lost while the other ranks' GPUs run pending operations and may read its memory. The
// next operation, or the pending wait, reports it.
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

// One rank sends something that the other rank does not expect, or is lost.
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
    if (sends) message.in = ConstBufferList(Pointer(at), values.size());
    if (!sends) message.out = BufferList(Pointer(at), values.size());
    c.Run(std::move(message));
  };
  const bool on_host = plan.device->transport == "host";
  OnEachRank(plan, [&pass, on_host](Communicator& c) {
    Memory memory;
    pass(c, memory, 9000);
    if (on_host) return;  // The sender may be gone before the receiver arrives.
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

int Copies() {
  void* const driver = dlopen(FakeDriver().c_str(), RTLD_NOW);
  return reinterpret_cast<int (*)()>(dlsym(driver, "fake_copies"))();
}

// The sender or the receiver is lost during a message, with chunks in flight.
void LostInside(const Plan& plan) {
  for (const int lost : {0, 1}) {
    OnEachProcess(plan, lost, [lost](Communicator& c) {
      setenv("FAKE_CUDA_SLOW_COPIES", "20000", 1);  // µs
      Memory memory;
      if (c.rank() == lost) {
        std::thread([enough = Copies() + 4] {
          while (Copies() < enough) std::this_thread::yield();
          kill(getpid(), SIGKILL);
        }).detach();
      }
      const auto pass = [&] { Message(c, memory, 40'000); };  // 20 chunks
      ExpectError(pass, Code::kUnavailable, {"rank " + std::to_string(lost)});
    });
  }
}

// One rank passes no data, or an unsupported reduction; the next operation succeeds.
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
  // The same values, divided differently into tensors.
  OnEachRank(plan, [](Communicator& c) {
    Memory memory;
    const std::vector<size_t> cut =
        c.rank() ? std::vector<size_t>{30, 10} : std::vector<size_t>{20, 20};
    const auto reduce = [&] { AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, cut); };
    ExpectError(reduce, Code::kMismatch, {"The shapes differ."});
  });
}

// The remaining process of a group can use its GPU.
void ExpectThatTheGpuWorksOn() {
  const GpuRanks alone = MakeGpuRanks(1);
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

// A rank is stopped, and its process lives on with its GPU resources.
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
    if (c.rank() == 0) kill(*stopped, SIGKILL);  // so that it also ends
  });
  munmap(stopped, sizeof(pid_t));
}

// A rank's GPU has no memory for the other ranks' data, and they learn why.
void WithoutMemory(const Plan& plan) {
  OnEachProcess(plan, -1, [](Communicator& c) {
    Memory memory;
    AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {5000});
    memory.Clear();
    const Gpu gpu(0);
    const std::vector<char> own = Fill(DType::kFloat32, 700, c.rank());
    Operation gather =
        OnDevice(memory, Kind::kAllGather, DType::kFloat32, ReduceOp::kSum, "gather");
    gather.row_bytes = 4;
    gather.sent_rows = {700};
    gather.in = ConstBufferList(Pointer(memory.Put(own)), own.size());
    gather.allocate = [&](const std::vector<size_t>& rows) {
      if (c.rank() == 1) DeviceMemory(gpu, size_t{1} << 50);
      const size_t bytes = rows.size() * own.size();
      return BufferList(Pointer(memory.Take(bytes)), bytes);
    };
    ExpectError([&] { c.Run(std::move(gather)); }, Code::kInternal,
                {"cuMemAlloc_v2 of the GPU's driver has failed: out of memory"});
    ExpectThatTheGpuWorksOn();
  });
}

// A rank has arrived but cannot launch, while the other ranks wait on their GPUs.
void Broken(const Plan& plan) {
  OnEachProcess(plan, -1, [](Communicator& c) {
    Memory memory;
    AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {5000});
    if (c.rank() == 1) { FailDriver("cuLaunchKernel", 2); }
    ExpectError([&] { AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {5000}); },
                Code::kInternal, {"cuLaunchKernel of the GPU's driver has failed: out of memory"});
  });
}

// At the end, a rank is stopped before it sends its farewell.
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

// A rank's GPU hangs after the rank has signaled its arrival, and its process lives on.
void Stuck(Plan plan) {
  plan.timeout_seconds = 5;
  OnEachProcess(plan, -1, [](Communicator& c) {
    Memory memory;
    AllReduce(c, memory, DType::kFloat32, ReduceOp::kSum, {5000});
    memory.Clear();
    const std::vector<char> values = Fill(DType::kFloat32, 5000, c.rank());
    char* const at = Pointer(memory.Put(values));
    Operation operation = OnDevice(memory, Kind::kAllReduce, DType::kFloat32, ReduceOp::kSum, "x");
    operation.in = ConstBufferList(at, values.size());
    operation.out = BufferList(at, values.size());
    const auto run = [&] { c.Run(std::move(operation)); };
    if (c.rank() == 0) {
      return ExpectError(run, Code::kUnavailable, {"though all ranks have joined it"});
    }
    setenv("FAKE_CUDA_LINKS", "0--1:stuck", 1);
    try {
      run();
    } catch (const Error& error) { _exit(error.code() != Code::kUnavailable); }
    _exit(1);  // Only the end of the process frees the stuck GPU.
  });
}

// NCCL fails on one rank, during the call or after all ranks have launched: all ranks learn of it,
// and the next group works.
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
  // Plans with processes are first: a process that forks must not have a driver yet.
  std::vector<std::function<void()>> stops;
  for (const char* const transport : {"p2p", "nccl", "host"}) {
    Lost(PlanFor(transport, 3, 1, As::kProcesses));
    WithoutMemory(PlanFor(transport, 3, 1, As::kProcesses));
    stops.push_back([=] { Stopped(PlanFor(transport, 3, 1, As::kProcesses)); });
  }
  const Plan streams = PlanForStreams(3, As::kProcesses);
  stops.push_back([=] { Stopped(streams); });
  stops.push_back([] { LeftAlone(PlanForStreams(2, As::kProcesses)); });
  stops.push_back([] { Stuck(PlanForStreams(2, As::kProcesses)); });
  InParallel(stops);
  for (const char* const transport : {"p2p", "nccl", "host"}) {
    Messages(PlanFor(transport, 2, 1, As::kProcesses));
    LostBesides(PlanFor(transport, 3, 1, As::kProcesses));
  }
  LostInside(PlanFor("p2p", 2, 1, As::kProcesses));
  Broken(PlanFor("p2p", 3, 1, As::kProcesses));
  Lost(streams);
  LostBesides(streams);
  Broken(streams);
  Messages(PlanForStreams(2, As::kProcesses));
  for (const bool later : {false, true}) NcclFails(PlanFor("nccl", 3, 1, As::kProcesses), later);
  for (const char* const transport : {"p2p", "nccl", "host"}) {
    Mismatches(PlanFor(transport, 2, 1, As::kThreads));
  }
  for (const char* const transport : {"p2p", "nccl"}) {
    Refusals(PlanFor(transport, 2, 1, As::kThreads));
  }
  Mismatches(PlanForStreams(2, As::kThreads));
  Refusals(PlanForStreams(2, As::kThreads));
}

void OnAGpu() {
  for (const char* const transport : {"p2p", "host"}) {
    Lost(PlanFor(transport, 3, 1, As::kProcesses));
    Stopped(PlanFor(transport, 3, 1, As::kProcesses));
    WithoutMemory(PlanFor(transport, 3, 1, As::kProcesses));
    Messages(PlanFor(transport, 2, 1, As::kProcesses));
    LostBesides(PlanFor(transport, 3, 1, As::kProcesses));
  }
  if (!Environment("NCCL_RANKS").empty()) {  // a version that lets two ranks share a GPU
    Lost(PlanFor("nccl", 2, 1, As::kProcesses));
    Stopped(PlanFor("nccl", 2, 1, As::kProcesses));
    LostBesides(PlanFor("nccl", 2, 1, As::kProcesses));
  }
  Lost(PlanForStreams(3, As::kProcesses));
  LostBesides(PlanForStreams(3, As::kProcesses));
  Mismatches(PlanFor("p2p", 2, 1, As::kThreads));
}

}  // namespace
}  // namespace tfdist::testing

int main() {
  using namespace tfdist::testing;
  return Report(FakeDriver().empty() ? OnAGpu : WithFakes);
}
