// What happens when ranks disagree, die, stop, or give up: an error on every rank, soon, that
// names what happened; and nothing is left behind.
#include <dirent.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "tests/team.h"

namespace tfdist::testing {
namespace {

constexpr Kind kKindsOfGroups[] = {Kind::kAllReduce, Kind::kReduceScatter, Kind::kAllGather,
                                   Kind::kBroadcast, Kind::kAllToAll,      Kind::kBarrier};

// A collective of any kind over `count` floats a rank.
struct Call {
  explicit Call(Communicator& c, Kind kind, size_t count, const std::string& name = "x",
                DType type = DType::kFloat32) {
    const auto ranks = static_cast<size_t>(c.size());
    memory.assign(2 * count * ranks * SizeOf(type) + 1, 0);
    const size_t bytes = count * SizeOf(type);
    operation.fingerprint.kind = kind;
    operation.fingerprint.type = type;
    operation.fingerprint.SetName(name);
    size_t in = bytes, out = bytes;
    if (kind == Kind::kReduceScatter || kind == Kind::kAllToAll) in *= ranks;
    if (kind == Kind::kAllGather || kind == Kind::kAllToAll) out *= ranks;
    if (kind == Kind::kBarrier) in = out = 0;
    if (kind != Kind::kAllGather && kind != Kind::kAllToAll && kind != Kind::kBarrier) {
      operation.fingerprint.AddShape({static_cast<int64_t>(count)});
    }
    operation.sent_bytes.assign(ranks, bytes);
    operation.received_bytes.assign(ranks, bytes);
    operation.in = ConstPieces(memory.data(), in);
    operation.out = Pieces(memory.data() + memory.size() / 2, out);
  }
  std::vector<char> memory;
  Operation operation;
};

void Do(Communicator& c, Kind kind, size_t count, const std::string& name = "x",
        DType type = DType::kFloat32) {
  Call call(c, kind, count, name, type);
  c.Run(std::move(call.operation));
}

double SecondsSince(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Runs what must fail, and checks how, how soon, and what it says.
void ExpectError(const std::function<void()>& what, Code code, double within,
                 const std::vector<std::string>& words) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    what();
  } catch (const Error& error) {
    const double seconds = SecondsSince(begin);
    for (const auto& word : words) {
      if (std::string(error.what()).find(word) == std::string::npos) {
        throw Failure("The message lacks '" + word + "': " + error.what());
      }
    }
    if (error.code() != code) {
      throw Failure("Code " + std::to_string(static_cast<int>(error.code())) + ": " +
                    error.what());
    }
    if (seconds > within) {
      throw Failure("It took " + std::to_string(seconds) + " s: " + error.what());
    }
    return;
  }
  std::string expected;
  for (const auto& word : words) expected += " '" + word + "'";
  throw Failure("No error was raised; expected:" + expected);
}

constexpr double kSoon = 1.0 + 1.0;  // a second, and one for a busy machine

void Mismatches(const Plan& plan) {
  for (const size_t count : {size_t{10}, size_t{100'000}}) {
    for (const Kind kind : kKindsOfGroups) {
      const auto failing = [&](const char* what, const std::function<void(Communicator&)>& odd) {
        OnEachRank(plan, [&](Communicator& c) {
          Do(c, Kind::kBarrier, 0);
          ExpectError([&] { c.rank() == 1 ? odd(c) : Do(c, kind, count); }, Code::kMismatch,
                      kSoon, {"rank 1", "rank "});
          // What follows fails at once with the same reason.
          ExpectError([&] { Do(c, kind, count); }, Code::kMismatch, 0.2, {"rank 1"});
        });
        (void)what;
      };
      failing("name", [&](Communicator& c) { Do(c, kind, count, "y"); });
      failing("kind", [&](Communicator& c) {
        Do(c, kind == Kind::kBarrier ? Kind::kAllReduce : Kind::kBarrier, count);
      });
      if (kind == Kind::kBarrier) continue;
      failing("type", [&](Communicator& c) { Do(c, kind, count, "x", DType::kInt32); });
      if (kind == Kind::kAllGather) continue;
      failing("count", [&](Communicator& c) { Do(c, kind, count + 1); });
    }
    // Another order of two of them.
    OnEachRank(plan, [&](Communicator& c) {
      ExpectError(
          [&] {
            Do(c, Kind::kAllReduce, count, c.rank() == 1 ? "b" : "a");
            Do(c, Kind::kAllReduce, count, c.rank() == 1 ? "a" : "b");
          },
          Code::kMismatch, kSoon, {"'a'", "'b'"});
    });
  }
  // A message where the others are in a collective.
  OnEachRank(plan, [&](Communicator& c) {
    ExpectError(
        [&] {
          if (c.rank() != 1) return Do(c, Kind::kAllReduce, 10);
          Call call(c, Kind::kBroadcast, 10);
          call.operation.fingerprint.kind = Kind::kReceive;
          call.operation.peer = 0;
          c.Run(std::move(call.operation));
        },
        Code::kMismatch, kSoon, {"receive", "all_reduce"});
  });
}

// Rank 1 dies or stops before its share of the third collective; the others name it.
void Losses(const Plan& plan, int signal, double within, const std::string& word) {
  auto* const victim = static_cast<std::atomic<pid_t>*>(
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  for (const size_t count : {size_t{10}, size_t{300'000}}) {
    for (const Kind kind : kKindsOfGroups) {
      OnEachProcess(plan, 1, [&](Communicator& c) {
        if (c.rank() == 1) {
          Do(c, kind, count);
          Do(c, kind, count);
          *victim = getpid();
          kill(getpid(), signal);
          std::this_thread::sleep_for(std::chrono::seconds(60));
        }
        ExpectError(
            [&] {
              for (;;) Do(c, kind, count);
            },
            Code::kUnavailable, within, {"rank 1 is lost", word, NameOf(kind)});
        // One that only stopped must end, too, once all have noticed that it stopped.
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        if (c.rank() == 0) kill(*victim, SIGKILL);
      });
    }
  }
  munmap(victim, 4096);
}

void Deadline(Plan plan) {
  plan.timeout_seconds = 0.5;
  plan.stall_seconds = 0.2;
  OnEachRank(plan, [&](Communicator& c) {
    if (c.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::seconds(2));
      return;
    }
    ExpectError([&] { Do(c, Kind::kAllReduce, 10); }, Code::kUnavailable, 1.5,
                {"all_reduce 'x'", "rank 1"});
  });
}

void AbortedByOne(const Plan& plan) {
  OnEachRank(plan, [&](Communicator& c) {
    Do(c, Kind::kBarrier, 0);
    if (c.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      c.Abort(Code::kUnavailable, "the user pressed a key");
    }
    ExpectError([&] { Do(c, Kind::kAllReduce, 100'000); }, Code::kUnavailable, kSoon,
                {"the user pressed a key"});
  });
}

void LeftByOne(const Plan& plan) {
  OnEachRank(plan, [&](Communicator& c) {
    Do(c, Kind::kAllReduce, 10);
    if (c.rank() == 1) return c.Close();
    ExpectError([&] { Do(c, Kind::kAllReduce, 10); }, Code::kUnavailable, kSoon,
                {"rank 1 has left"});
  });
}

void ClosedHere(const Plan& plan) {
  OnEachRank(plan, [&](Communicator& c) {
    Do(c, Kind::kAllReduce, 10);
    c.Close();
    ExpectError([&] { Do(c, Kind::kAllReduce, 10); }, Code::kClosed, 0.1, {"closed"});
    c.Close();
  });
}

int OpenDescriptors() {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder)) ++count;
  closedir(folder);
  return count;
}

int Mappings() {
  FILE* maps = std::fopen("/proc/self/maps", "r");
  char line[4096];
  int count = 0;
  while (std::fgets(line, sizeof(line), maps)) count += std::strstr(line, "tfdist-test") != nullptr;
  std::fclose(maps);
  return count;
}

int Threads() {
  int count = 0;
  DIR* folder = opendir("/proc/self/task");
  while (readdir(folder)) ++count;
  closedir(folder);
  return count;
}

void MadeAnew(const Plan& plan, int rounds) {
  const auto round = [&](int number) {
    OnEachRank(plan, [&](Communicator& c) {
      try {
        Do(c, Kind::kAllReduce, 1000);
        if (number % 3 == 1 && c.rank() == 0) c.Abort(Code::kUnavailable, "a round ends early");
        if (number % 3 == 2) return;
        Do(c, Kind::kAllGather, 1000);
      } catch (const Error&) {
        EXPECT(number % 3 == 1);
      }
    });
  };
  round(0);
  const int descriptors = OpenDescriptors(), mappings = Mappings(), threads = Threads();
  for (int number = 0; number < rounds; ++number) round(number);
  EXPECT(OpenDescriptors() == descriptors);
  EXPECT(Mappings() == mappings);
  EXPECT(Threads() == threads);
}

Plan Arranged(int ranks, int hosts, As as) {
  Plan plan;
  plan.ranks = ranks;
  plan.hosts = hosts;
  plan.as = as;
  return plan;
}

void RunAll(bool threads_only, int rounds) {
  for (const auto& [ranks, hosts] : {std::pair{2, 1}, {2, 2}, {3, 1}, {4, 2}}) {
    const Plan threads = Arranged(ranks, hosts, As::kThreads);
    Mismatches(threads);
    AbortedByOne(threads);
    LeftByOne(threads);
    ClosedHere(threads);
    Deadline(threads);
    MadeAnew(threads, rounds);
    if (!threads_only) {
      Losses(Arranged(ranks, hosts, As::kProcesses), SIGKILL, kSoon, "its process has ended");
      Plan quick = Arranged(ranks, hosts, As::kProcesses);
      quick.heartbeat_seconds = 1;
      Losses(quick, SIGSTOP, 1 + kSoon, "no sign of life for 1.0 s");
    }
    std::printf("faults with %d ranks on %d hosts: ok\n", ranks, hosts);
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace tfdist::testing

int main(int argc, char** argv) {
  const std::string which = argc > 1 ? argv[1] : "both";
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 50;
  try {
    tfdist::testing::RunAll(which == "threads", rounds);
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return 1;
  }
}
