// All-reduces among the GPUs of several processes, which open each other's memory, and wait by
// kernels or by streams. One process is killed, stopped, or lacks GPU memory. See `device_test.cc`
// for the driver; no process has one before it forks.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "cpp/calls.h"
#include "cpp/gpu_ranks.h"
#include "cpp/ranks.h"
#include "device/gpu.h"

namespace tfdist::testing {
namespace {

// The fate of the last rank before the other ranks' last all-reduce.
enum class Fate { kLives, kIsKilled, kIsStopped, kLacksMemory };

constexpr size_t kMoreThanThereIs = size_t{1} << 50;

// Pipes between all processes.
class Pipes {
 public:
  explicit Pipes(uint32_t ranks) : ranks_(ranks), ends_(size_t{ranks} * ranks) {
    for (End& end : ends_) EXPECT(pipe(end.pipe) == 0);
  }
  ~Pipes() {
    for (const End& end : ends_) {
      for (const int descriptor : end.pipe) close(descriptor);
    }
  }
  Pipes(const Pipes&) = delete;
  Pipes& operator=(const Pipes&) = delete;

  void Say(uint32_t from, uint32_t to, const cuda::IpcHandle& handle) {
    EXPECT(write(ends_[from * ranks_ + to].pipe[1], &handle, sizeof(handle)) ==
           ssize_t{sizeof(handle)});
  }
  cuda::IpcHandle Hear(uint32_t from, uint32_t to) {
    cuda::IpcHandle handle;
    EXPECT(read(ends_[from * ranks_ + to].pipe[0], &handle, sizeof(handle)) ==
           ssize_t{sizeof(handle)});
    return handle;
  }

 private:
  struct End {
    int pipe[2];
  };
  const uint32_t ranks_;
  std::vector<End> ends_;
};

// The memory shared by another process.
struct Peer {
  Peer(const Gpu& gpu, const cuda::IpcHandle& staging, const cuda::IpcHandle& words)
      : staging(gpu, staging), words(gpu, words) {}
  PeerMemory staging, words;
};

void Run(Pipes& pipes, uint32_t rank, uint32_t ranks, Fate fate, const StreamWords* words) {
  cuda::Load(FakeDriver());
  GpuRank gpu;
  for (uint32_t other = 0; other < ranks; ++other) {
    if (other == rank) continue;
    pipes.Say(rank, other, gpu.staging.Share());
    pipes.Say(rank, other, gpu.words.Share());
  }
  std::vector<std::unique_ptr<Peer>> peers;
  std::vector<KernelAllReduce::Shared> shared;
  for (uint32_t other = 0; other < ranks; ++other) {
    if (other == rank) {
      shared.push_back(gpu.own());
      continue;
    }
    const cuda::IpcHandle staging = pipes.Hear(other, rank), words = pipes.Hear(other, rank);
    peers.push_back(std::make_unique<Peer>(gpu.gpu, staging, words));
    shared.push_back({peers.back()->staging.address(), peers.back()->words.address()});
  }
  gpu.Join(rank, shared, 600, words);
  // No rank may be written to before it has cleared its words.
  for (uint32_t other = 0; other < ranks; ++other) {
    if (other != rank) pipes.Say(rank, other, {});
  }
  for (uint32_t other = 0; other < ranks; ++other) {
    if (other != rank) pipes.Hear(other, rank);
  }
  const auto reduces = [&](const std::vector<size_t>& counts) {
    return gpu.Reduces(DType::kFloat32, ReduceOp::kMax, counts, static_cast<int>(rank),
                       static_cast<int>(ranks));
  };
  for (int round = 0; round < 5; ++round) {
    EXPECT(reduces({3000, 5}));
    EXPECT(reduces({20}));
  }
  if (fate == Fate::kLives) return;
  const uint32_t last = ranks - 1;
  if (rank == last) {
    if (fate == Fate::kLacksMemory) {
      ExpectError([&] { DeviceMemory(gpu.gpu, kMoreThanThereIs); }, Code::kInternal,
                  {"cuMemAlloc_v2", "out of memory"});
    }
    for (uint32_t other = 0; other < last; ++other) pipes.Say(rank, other, {});
    if (fate == Fate::kIsKilled) raise(SIGKILL);
    if (fate == Fate::kIsStopped) raise(SIGSTOP);
  } else {
    std::thread watch([&] {
      pipes.Hear(last, rank);
      gpu.all_reduce->Abort();
    });
    EXPECT(!reduces({3000}));
    EXPECT(gpu.all_reduce->outcome() == device::Outcome::kAborted);
    watch.join();
  }
  gpu.Join(0, {gpu.own()});  // The GPU still works.
  EXPECT(gpu.Reduces(DType::kFloat32, ReduceOp::kSum, {3000, 5}, 0, 1));
}

void Processes(uint32_t ranks, Fate fate, bool streams_wait) {
  Pipes pipes(ranks);
  const StreamWords words;
  std::vector<pid_t> children;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    children.push_back(fork());
    if (children.back() != 0) continue;
    try {
      Run(pipes, rank, ranks, fate, streams_wait ? &words : nullptr);
      _exit(0);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %u of %u: %s\n", rank, ranks, error.what());
      _exit(1);
    }
  }
  const bool is_lost = fate == Fate::kIsKilled || fate == Fate::kIsStopped;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const bool is_last = rank == ranks - 1;
    // It has been stopped so far, while all other ranks have finished.
    if (is_last && fate == Fate::kIsStopped) kill(children[rank], SIGKILL);
    int status = 0;
    waitpid(children[rank], &status, 0);
    const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    EXPECT(is_last && is_lost ? killed : status == 0);
  }
}

}  // namespace
}  // namespace tfdist::testing

int main() {
  using namespace tfdist::testing;
  try {
    for (const bool streams_wait : {false, true}) {
      Processes(2, Fate::kLives, streams_wait);
      Processes(4, Fate::kLives, streams_wait);
      for (const Fate fate : {Fate::kIsKilled, Fate::kIsStopped, Fate::kLacksMemory}) {
        Processes(3, fate, streams_wait);
        Processes(2, Fate::kLives, streams_wait);
      }
    }
    std::printf("ok\n");
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return 1;
  }
}
