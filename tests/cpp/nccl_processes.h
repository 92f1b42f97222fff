// Processes that each have a rank in the same groups of NCCL; all of them share one GPU if it is
// real.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <functional>
#include <vector>

#include "cpp/calls.h"
#include "cpp/nccl_threads.h"
#include "device/nccl_group.h"

namespace tfdist::testing {

// One of the processes. There is a pipe between every two of them.
class NcclProcess {
 public:
  using Pipes = std::vector<std::array<int, 2>>;

  NcclProcess(int number, int size, const Pipes& pipes)
      : number(number), size(size), pipes_(pipes) {
    for (int i = 0; i < size * size; ++i) {
      if (i / size != number)
        close(pipes_[static_cast<size_t>(i)][1]);  // so that the end of the pipe is noticed
    }
  }

  // The setup with which all join the next group; rank 0 creates its identifier.
  NcclGroup::Setup NextGroup() {
    NcclGroup::Setup setup{nullptr, {}, number, size};
    if (number == 0) setup.id = NcclGroup::NewId();
    for (int other = 1; number == 0 && other < size; ++other) Send(other, setup.id);
    if (number != 0) EXPECT(Hear(0, &setup.id));
    return setup;
  }
  // Waits for all processes.
  void Synchronize() {
    nccl::UniqueId nothing{};
    for (int other = 0; other < size; ++other) {
      if (other != number) Send(other, nothing);
    }
    for (int other = 0; other < size; ++other) {
      if (other != number) EXPECT(Hear(other, &nothing));
    }
  }
  void AwaitEndOf(int other) {
    nccl::UniqueId nothing;
    EXPECT(!Hear(other, &nothing));
  }

  const int number, size;

 private:
  const std::array<int, 2>& Pipe(int from, int to) const {
    return pipes_[static_cast<size_t>(from * size + to)];
  }
  void Send(int to, const nccl::UniqueId& id) {
    EXPECT(write(Pipe(number, to)[1], &id, sizeof(id)) == ssize_t{sizeof(id)});
  }
  bool Hear(int from, nccl::UniqueId* id) {
    return read(Pipe(from, number)[0], id, sizeof(*id)) == ssize_t{sizeof(*id)};
  }

  const Pipes& pipes_;
};

// Runs each rank's body in a process; called before this process has a driver. Args: killed: the
// rank that kills itself.
inline void OnEachNcclProcess(int size, const std::function<void(NcclProcess&)>& body,
                              int killed = -1) {
  NcclProcess::Pipes pipes(static_cast<size_t>(size * size));
  for (auto& ends : pipes) EXPECT(pipe(ends.data()) == 0);
  std::fflush(nullptr);
  std::vector<pid_t> children;
  for (int number = 0; number < size; ++number) {
    children.push_back(fork());
    EXPECT(children.back() >= 0);
    if (children.back() > 0) continue;
    const int code = Report([&] {
      LoadLibraries();
      NcclProcess process(number, size, pipes);
      body(process);
    });
    std::fflush(nullptr);
    _exit(code);
  }
  for (const auto& ends : pipes) {
    for (const int end : ends) close(end);
  }
  bool good = true;
  for (int number = 0; number < size; ++number) {
    int status = 0;
    waitpid(children[static_cast<size_t>(number)], &status, 0);
    good = good &&
           (number == killed ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL : status == 0);
  }
  EXPECT(good);
}

}  // namespace tfdist::testing
