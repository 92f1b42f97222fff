#include "cpp/ranks.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <thread>

namespace tfdist::testing {
namespace {

int HostOf(const Plan& plan, int rank) { return rank % plan.hosts; }

void ConnectTcp(int ends[2]) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  EXPECT(bind(listener, reinterpret_cast<sockaddr*>(&address), length) == 0);
  EXPECT(listen(listener, 1) == 0);
  EXPECT(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) == 0);
  ends[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT(connect(ends[0], reinterpret_cast<sockaddr*>(&address), length) == 0);
  ends[1] = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  EXPECT(ends[1] >= 0);
  close(listener);
}

void CloseAll(std::vector<int>& descriptors) {
  for (int& descriptor : descriptors) {
    if (descriptor >= 0) close(descriptor);
    descriptor = -1;
  }
}

}  // namespace

Wiring::Wiring(const Plan& plan) : plan_(plan) {
  const auto n = static_cast<size_t>(plan.ranks);
  control_.assign(n, std::vector<int>(n, -1));
  data_ = control_;
  for (size_t a = 0; a < n; ++a) {
    for (size_t b = a + 1; b < n; ++b) {
      int ends[2];
      EXPECT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
      control_[a][b] = ends[0];
      control_[b][a] = ends[1];
      if (HostOf(plan, static_cast<int>(a)) == HostOf(plan, static_cast<int>(b))) continue;
      ConnectTcp(ends);
      data_[a][b] = ends[0];
      data_[b][a] = ends[1];
    }
  }
  segment_bytes_ = Segment::BytesFor(plan.ranks);
  for (int host = 0; host < plan.hosts; ++host) {
    const int segment = memfd_create("tfdist-test", MFD_CLOEXEC);
    EXPECT(ftruncate(segment, static_cast<off_t>(segment_bytes_)) == 0);
    segments_.push_back(segment);
    void* memory = nullptr;
    if (plan.as == As::kThreads) {
      memory = mmap(nullptr, segment_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, segment, 0);
      EXPECT(memory != MAP_FAILED);
    }
    memories_.push_back(memory);
  }
}

Wiring::~Wiring() {
  for (auto& descriptors : control_) CloseAll(descriptors);
  for (auto& descriptors : data_) CloseAll(descriptors);
  CloseAll(segments_);
  for (void* memory : memories_) {
    if (memory) munmap(memory, segment_bytes_);
  }
}

Communicator::Setup Wiring::Take(int rank) {
  Communicator::Setup setup;
  setup.name = "test";
  setup.device = plan_.device;
  setup.rank = rank;
  int local = 0;
  for (int other = 0; other < plan_.ranks; ++other) {
    setup.names.push_back("rank " + std::to_string(other));
    setup.hosts.push_back(HostOf(plan_, other));
    if (HostOf(plan_, other) == HostOf(plan_, rank)) ++local;
  }
  const auto i = static_cast<size_t>(rank);
  setup.control = control_[i];
  setup.data = data_[i];
  control_[i].assign(control_.size(), -1);
  data_[i].assign(data_.size(), -1);
  const auto host = static_cast<size_t>(HostOf(plan_, rank));
  if (local > 1 && plan_.as == As::kThreads) {
    setup.segment = std::make_unique<Segment>(memories_[host], segment_bytes_, local);
  } else if (local > 1) {
    setup.segment = std::make_unique<Segment>(dup(segments_[host]), segment_bytes_, local);
  }
  if (plan_.as == As::kProcesses) {
    for (auto& descriptors : control_) CloseAll(descriptors);
    for (auto& descriptors : data_) CloseAll(descriptors);
  }
  setup.silence_warning_seconds = plan_.silence_warning_seconds;
  setup.silence_timeout_seconds = plan_.silence_timeout_seconds;
  setup.stall_seconds = plan_.stall_seconds;
  setup.timeout_seconds = plan_.timeout_seconds;
  setup.algorithm =
      plan_.algorithms.empty() ? plan_.algorithm : plan_.algorithms[static_cast<size_t>(rank)];
  // Every test can run in TLS: with the folder tests/certificates of the repository.
  if (const char* folder = std::getenv("TFDIST_TEST_TLS")) {
    const std::string base = folder;
    setup.tls = {base + "/worker.pem", base + "/worker.key", base + "/ca.pem"};
  }
  setup.warn = [](const std::string& message) { std::fprintf(stderr, "%s\n", message.c_str()); };
  return setup;
}

void OnEachRank(const Plan& plan, const std::function<void(Communicator&)>& body) {
  if (plan.as == As::kProcesses) return OnEachProcess(plan, -1, body);
  Wiring wiring(plan);
  std::vector<Communicator::Setup> setups;
  for (int rank = 0; rank < plan.ranks; ++rank) setups.push_back(wiring.Take(rank));
  OnEachThread(std::move(setups), body);
}

void OnEachThread(std::vector<Communicator::Setup> setups,
                  const std::function<void(Communicator&)>& body) {
  std::vector<std::exception_ptr> failures(setups.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < setups.size(); ++i) {
    threads.emplace_back([&, i] {
      Communicator communicator(std::move(setups[i]));
      try {
        body(communicator);
      } catch (...) {
        failures[i] = std::current_exception();
        communicator.Abort(Error(Code::kInternal, "A test failed."));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

void OnEachProcess(const Plan& given, int may_die, const std::function<void(Communicator&)>& body) {
  Plan plan = given;
  plan.as = As::kProcesses;
  Wiring wiring(plan);
  std::fflush(nullptr);
  std::vector<pid_t> children;
  for (int rank = 0; rank < plan.ranks; ++rank) {
    const pid_t child = fork();
    EXPECT(child >= 0);
    if (child > 0) {
      children.push_back(child);
      continue;
    }
    int code = 0;
    try {
      Communicator communicator(wiring.Take(rank));
      try {
        body(communicator);
      } catch (const std::exception&) {
        communicator.Abort(Error(Code::kInternal, "A test failed."));
        throw;
      }
    } catch (const std::exception& failure) {
      std::fprintf(stderr, "rank %d: %s\n", rank, failure.what());
      code = 1;
    }
    std::fflush(nullptr);
    _exit(code);
  }
  for (int rank = 0; rank < plan.ranks; ++rank) {
    Communicator::Setup setup = wiring.Take(rank);
    CloseAll(setup.control);
    CloseAll(setup.data);
  }
  bool failed = false;
  for (int rank = 0; rank < plan.ranks; ++rank) {
    int status = 0;
    waitpid(children[static_cast<size_t>(rank)], &status, 0);
    failed = failed || (rank != may_die && !(WIFEXITED(status) && WEXITSTATUS(status) == 0));
  }
  if (failed) throw Failure("A rank failed.");
}

void InParallel(const std::vector<std::function<void()>>& tests) {
  std::fflush(nullptr);
  std::vector<pid_t> children;
  for (const auto& test : tests) {
    children.push_back(fork());
    EXPECT(children.back() >= 0);
    if (children.back() > 0) continue;
    int code = 0;
    try {
      test();
    } catch (const std::exception& failure) {
      std::fprintf(stderr, "%s\n", failure.what());
      code = 1;
    }
    std::fflush(nullptr);
    _exit(code);
  }
  bool failed = false;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    failed = failed || !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  if (failed) throw Failure("One of several tests failed.");
}

}  // namespace tfdist::testing
