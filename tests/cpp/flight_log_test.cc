// Usage: flight_log_test [threads | FOLDER]
//
// The flight log: who writes it, when and why; it is written completely or not at all. With
// "threads", only the tests within one process; with a folder, the ranks' logs are kept there for
// other programs to read.
#include "control/flight_log.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <clocale>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "control/communicator_state.h"
#include "cpp/calls.h"

namespace tfdist::testing {
namespace {

void Nap() { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }

bool Exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

std::string Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

size_t Count(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

bool Has(const std::string& text, const std::string& part) { return Count(text, part) > 0; }

bool Whole(const std::string& text) {
  const std::string end = "\"}\n";  // of the stacks
  return text.compare(0, 12, "{\"format\":1,") == 0 && text.size() > end.size() &&
         text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Waits until the log contains all parts.
std::string Await(const std::string& path, const std::vector<std::string>& parts) {
  for (;;) {
    const std::string text = Read(path);
    size_t had = 0;
    for (const std::string& part : parts) had += Has(text, part);
    if (had == parts.size()) {
      EXPECT(Whole(text));
      return text;
    }
    Nap();
  }
}

std::string Reason(const char* kind) { return std::string("\"kind\":\"") + kind + "\""; }

class Folder {
 public:
  Folder() {
    const char* const parent = std::getenv("TMPDIR");
    path_ = std::string(parent ? parent : "/tmp") + "/tfdist-flight-XXXXXX";
    EXPECT(mkdtemp(path_.data()) != nullptr);
  }
  ~Folder() {
    for (const std::string& file : files_) {
      unlink(file.c_str());
      unlink((file + ".tmp").c_str());
    }
    rmdir(path_.c_str());
  }
  std::string File(const std::string& name) {
    files_.push_back(path_ + "/" + name);
    return files_.back();
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::vector<std::string> files_;
};

// The warnings so far.
struct Warnings {
  std::mutex mutex;
  std::vector<std::string> all;

  size_t count() {
    const std::lock_guard<std::mutex> lock(mutex);
    return all.size();
  }
};

Warnings& Start(const std::string& path, std::function<std::string()> communicators = {},
                const std::string& header = "\"rank\":0,\"size\":1") {
  static Warnings* const warnings = new Warnings;
  FlightLog::Settings settings;
  settings.path = path;
  settings.header = header;
  settings.communicators = communicators ? communicators : [] { return std::string("[]"); };
  settings.warn = [](const std::string& message) {
    const std::lock_guard<std::mutex> lock(warnings->mutex);
    warnings->all.push_back(message);
  };
  FlightLog::Instance().Start(std::move(settings));
  return *warnings;
}

void Ask(const char* kind, const std::string& message) {
  FlightLog::Instance().Ask(kind, "group", message);
}

void Flush() { FlightLog::Instance().Flush(3600); }

// Provides stacks on request, as Python does; never ends.
void GiveStacks(const std::string& stacks) {
  std::thread([stacks] {
    for (uint64_t count;;) {
      if (read(FlightLog::Instance().stacks_wanted(), &count, sizeof(count)) == sizeof(count)) {
        FlightLog::Instance().GiveStacks(stacks);
      }
    }
  }).detach();
}

// Ranks as processes, each with its own log.
void OnRanks(const Plan& plan, const std::string& base,
             const std::function<void(Communicator&, const std::string& path)>& body) {
  OnEachProcess(plan, -1, [&](Communicator& c) {
    const std::string rank = std::to_string(c.rank()), path = base + rank + ".json";
    const auto communicators = [&c] {
      JsonWriter json;
      json.Open('[');
      Write(c.State(Recorder::kRecords, 0), &json);
      return json.Close(']').text();
    };
    Start(path, communicators,
          "\"rank\":" + rank + ",\"size\":" + std::to_string(c.size()) + ",\"worker\":\"rank " +
              rank + "\",\"host\":\"node\",\"pid\":" + std::to_string(getpid()) +
              ",\"program\":\"test\"");
    GiveStacks("Thread of rank " + rank);
    Do(c, Kind::kBarrier, 0);
    body(c, path);
    Flush();
    c.Close();
  });
}

void OneAborts(const Plan& plan, const std::string& base) {
  OnRanks(plan, base, [](Communicator& c, const std::string& path) {
    if (c.rank() == 1) c.Abort(Error(Code::kUnavailable, "boom \"quoted\""));
    ExpectError([&] { Do(c, Kind::kAllReduce, 1000); }, Code::kUnavailable, {"boom"});
    Flush();
    const std::string text = Await(path, {"Thread of rank"});
    EXPECT(Has(text, Reason("error") + R"(,"communicator":"test","message":"boom \"quoted\"")"));
    EXPECT(Has(text, R"("aborted":{"message":"boom \"quoted\"",)") && Has(text, R"("steps":0)"));
    EXPECT(Count(text, Reason("error")) == 1 && Count(text, "\"communicator\"") == 1);
    EXPECT(Has(text, "\"rank\":" + std::to_string(c.rank()) + ",\"size\":3,\"worker\""));
    EXPECT(Count(text, "\"heard_ns\"") == 2 && Has(text, "\"kind\":\"barrier\""));
    EXPECT(Has(text, "\"stacks\":\"Thread of rank " + std::to_string(c.rank())));
    EXPECT(!Exists(path + ".tmp"));
  });
}

void AMismatch(const Plan& plan, const std::string& base) {
  OnRanks(plan, base, [](Communicator& c, const std::string& path) {
    ExpectError([&] { Do(c, Kind::kAllReduce, c.rank() == 1 ? 10 : 20); }, Code::kMismatch,
                {"rank 1"});
    const std::string text = Await(path, {Reason("error")});
    EXPECT(Has(text, "The ranks do not call the same collectives in the same order"));
    // One of ranks 0 and 2 may learn of it before its own call.
    const bool joined = c.rank() == 1 || Has(text, R"("kind":"all_reduce")");
    EXPECT(!joined || Has(text, c.rank() == 1 ? R"("shape":[10])" : R"("shape":[20])"));
  });
}

// The awaited rank also writes a log, and has not arrived by then.
void AStall(Plan plan, const std::string& base) {
  plan.stall_seconds = 0.3;
  OnRanks(plan, base, [&](Communicator& c, const std::string& path) {
    const std::string waited = "all_reduce 'x' float32[1000] sum has waited ";
    if (c.rank() == 2) {
      const std::string text = Await(path, {Reason("waited"), waited});
      EXPECT(Has(text, "\"rank 0: " + waited) || Has(text, "\"rank 1: " + waited));
      EXPECT(!Has(text, "\"kind\":\"all_reduce\""));
      EXPECT(Has(text, "\"in\":\"all_reduce 'x' float32[1000] sum\""));
      for (const char* const other : {"0", "1"}) {
        Await(base + other + ".json", {Reason("stall"), waited, " for rank 2."});
      }
    }
    Do(c, Kind::kAllReduce, 1000);
    if (c.rank() == 2) return;
    const std::string text = Await(path, {Reason("stall"), waited, " for rank 2."});
    EXPECT(!Has(text, Reason("error")) && Has(text, "\"aborted\":null"));
  });
}

std::atomic<int> handled{0};

void ASignal(const Plan& plan, const std::string& base) {
  signal(SIGUSR1, [](int) { ++handled; });
  OnRanks(plan, base, [](Communicator& c, const std::string& path) {
    FlightLog::Instance().AskOnSignal(SIGUSR1);
    FlightLog::Instance().AskOnSignal(SIGUSR1);  // Once.
    raise(SIGUSR1);
    // The earlier handler runs also.
    EXPECT(handled == 1);
    Await(path, {Reason("signal"), "Thread of rank " + std::to_string(c.rank())});
    Do(c, Kind::kBarrier, 0);
    raise(SIGUSR1);
    while (Count(Read(path), Reason("signal")) < 2) Nap();
    EXPECT(handled == 2);
  });
  signal(SIGUSR1, SIG_DFL);
}

// A rank that ends normally writes no log.
void NothingHappens(const Plan& plan, const std::string& base) {
  OnRanks(plan, base, [](Communicator& c, const std::string& path) {
    Do(c, Kind::kAllReduce, 1000);
    c.Close();
    Flush();
    EXPECT(!Exists(path));
  });
}

void BeforeTheStart() {
  Ask("error", "nobody has started it");
  FlightLog::Instance().AskOnSignal(SIGUSR1);
  Flush();
  EXPECT(FlightLog::Instance().stacks_wanted() == -1);
  struct sigaction action;
  EXPECT(sigaction(SIGUSR1, nullptr, &action) == 0 && action.sa_handler == SIG_DFL);
}

// One request per stall, by the thread that reports it.
void Stalls() {
  Folder folder;
  const std::string path = folder.File("flight.json");
  Start(path);
  GiveStacks("stacks");
  FlightLog::Instance().SetSession(R"({"name":"session","records":[1]})");
  EXPECT(FlightLog::Instance().TakeStalled() == "");
  Ask("stall", "told by others.");
  EXPECT(FlightLog::Instance().TakeStalled() == "");
  FlightLog::Instance().Stalled("group", "first.");
  Flush();
  const std::string text = Read(path);
  EXPECT(Whole(text) && Count(text, Reason("stall")) == 2 && Has(text, "first."));
  EXPECT(Has(text, R"(,"session":{"name":"session","records":[1]},"stacks":)"));
  EXPECT(FlightLog::Instance().TakeStalled() == "first.");
  EXPECT(FlightLog::Instance().TakeStalled() == "");
  // The session, as last reported.
  FlightLog::Instance().SetSession("{}");
  Ask("error", "boom");
  Flush();
  EXPECT(Has(Read(path), R"(,"session":{},"stacks":)"));
}

// The first reasons are kept, and the last one.
void ManyReasons() {
  Folder folder;
  const std::string path = folder.File("flight.json");
  Start(path);
  GiveStacks("stacks");
  for (int i = 0; i < 5000; ++i) Ask("stall", "number " + std::to_string(i) + ".");
  Flush();
  const std::string text = Read(path);
  EXPECT(Whole(text) && Count(text, Reason("stall")) == 16);
  for (int i = 0; i < 15; ++i) EXPECT(Has(text, "number " + std::to_string(i) + "."));
  EXPECT(!Has(text, "number 15.") && Has(text, "number 4999."));
  // If many ranks wait, one request suffices for a while.
  const std::string before = Read(path);
  Ask("waited", "first.");
  for (int i = 0; i < 5000; ++i) Ask("waited", "another one.");
  Flush();
  EXPECT(Has(Read(path), "first.") && !Has(Read(path), "another one."));
}

// A locale with a decimal comma, if installed, changes nothing.
void Numbers() {
  Folder folder;
  const std::string path = folder.File("flight.json");
  for (const char* const name : {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8"}) {
    if (std::setlocale(LC_ALL, name)) break;
  }
  Start(path);
  Ask("error", "boom");
  const std::string text = Await(path, {"boom"});
  const size_t at = text.find("\"written\":") + 10;
  const std::string written = text.substr(at, text.find(',', at) - at);
  EXPECT(written.size() == 14 && written[10] == '.');
  EXPECT(written.find_first_not_of("0123456789.") == std::string::npos);
}

// Readers find the old log or the new one, even after the process has been killed.
void Atomic() {
  Folder folder;
  const std::string path = folder.File("flight.json");
  const auto write_on = [&](int ready) {
    // Large enough to take several pages.
    Start(path, [] { return "[\"" + std::string(300000, 'x') + "\"]"; });
    GiveStacks("stacks");
    if (write(ready, "", 1) != 1) _exit(1);
    for (;;) {
      Ask("error", "boom");
      Nap();
    }
  };
  std::mt19937 random(1);
  int whole = 0;
  for (int round = 0; round < 30; ++round) {
    if (round % 10 == 0) unlink(path.c_str());
    int ready[2];
    EXPECT(pipe2(ready, O_CLOEXEC) == 0);
    const pid_t child = fork();
    EXPECT(child >= 0);
    if (child == 0) write_on(ready[1]);
    char byte;
    EXPECT(read(ready[0], &byte, 1) == 1);
    close(ready[0]);
    close(ready[1]);
    std::atomic<bool> over{false};
    std::thread killer([&] {
      // The first round has written at least one log.
      while (round == 0 && !Exists(path)) Nap();
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 40000));
      kill(child, SIGKILL);
      waitpid(child, nullptr, 0);
      over = true;
    });
    for (bool once_more = true; once_more;) {
      once_more = !over;
      if (!Exists(path)) continue;
      EXPECT(Whole(Read(path)));
      ++whole;
    }
    killer.join();
  }
  EXPECT(whole > 0);
}

void NowhereToWrite() {
  Folder folder;
  Warnings& warnings = Start(folder.path() + "/missing/flight.json");
  GiveStacks("stacks");
  for (int i = 0; i < 20; ++i) {
    Ask("error", "boom");
    Flush();
  }
  EXPECT(warnings.count() == 1);
  EXPECT(Has(warnings.all[0], folder.path() + "/missing/flight.json could not be written: No such "
                                              "file or directory. Set TFDIST_FLIGHT_DIR to"));
}

// The log stays unchanged, and is written once there is room.
void NoRoom() {
  Folder folder;
  const std::string path = folder.File("flight.json");
  const auto room = std::make_shared<std::atomic<size_t>>(10);
  Warnings& warnings = Start(path, [room] { return "[\"" + std::string(*room, 'x') + "\"]"; });
  GiveStacks("stacks");
  Ask("error", "the first");
  Flush();
  const std::string before = Read(path);
  EXPECT(Whole(before));
  rlimit limit;
  EXPECT(getrlimit(RLIMIT_FSIZE, &limit) == 0);
  const rlimit small{100000, limit.rlim_max};
  EXPECT(setrlimit(RLIMIT_FSIZE, &small) == 0);
  *room = 1000000;
  for (int i = 0; i < 5; ++i) {
    Ask("error", "another");
    Flush();
    EXPECT(Read(path) == before && !Exists(path + ".tmp"));
  }
  EXPECT(warnings.count() == 1 && Has(warnings.all[0], "could not be written: File too large"));
  *room = 20;
  Ask("error", "the last");
  Flush();
  EXPECT(Has(Read(path), "the last") && Whole(Read(path)) && warnings.count() == 1);
  EXPECT(setrlimit(RLIMIT_FSIZE, &limit) == 0);
}

// If memory for the log cannot be allocated, the only effect is a warning.
void NoMemory() {
  Folder folder;
  const std::string path = folder.File("flight.json");
  Warnings& warnings = Start(path, []() -> std::string { throw std::bad_alloc(); });
  GiveStacks("stacks");
  Ask("error", "boom");
  Flush();
  EXPECT(!Exists(path) && warnings.count() == 1);
  EXPECT(Has(warnings.all[0], "Cannot allocate memory"));
}

// It writes the available data at once; stacks follow when Python provides them; a newer reason
// does not wait for them.
void Stacks() {
  Folder folder;
  const std::string path = folder.File("flight.json");
  Start(path);
  Ask("stall", "the first.");
  EXPECT(Has(Await(path, {"the first."}), R"("stacks":"")"));
  pollfd wanted{FlightLog::Instance().stacks_wanted(), POLLIN, 0};
  EXPECT(poll(&wanted, 1, -1) == 1 && wanted.revents == POLLIN);
  FlightLog::Instance().GiveStacks("File \"train.py\", line 3");
  Await(path, {R"("stacks":"File \"train.py\", line 3")"});
  // No stacks are provided from here on.
  for (int i = 0; i < 5; ++i) {
    const std::string message = "number " + std::to_string(i) + ".";
    Ask("error", message);
    Await(path, {message});
  }
}

// A forked child has no log; its errors and signals are not its parent's.
void InAForkedChild() {
  Folder folder;
  const std::string path = folder.File("flight.json");
  signal(SIGUSR1, [](int) { ++handled; });
  Start(path);
  GiveStacks("stacks");
  FlightLog::Instance().AskOnSignal(SIGUSR1);
  const pid_t child = fork();
  EXPECT(child >= 0);
  if (child == 0) {
    raise(SIGUSR1);
    Ask("error", "the child's");
    Flush();
    _exit(handled == 1 ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  Ask("error", "the parent's");
  Flush();
  const std::string text = Read(path);
  EXPECT(Has(text, "the parent's") && !Has(text, "the child's") && !Has(text, Reason("signal")));
}

// Working communicators, errors and stalls from many threads, stacks and a signal, all
// concurrently.
void FromAllSides() {
  Folder folder;
  const std::string path = folder.File("flight.json");
  std::mutex mutex;
  std::vector<Communicator*> open;
  Start(path, [&] {
    const std::lock_guard<std::mutex> lock(mutex);
    JsonWriter json;
    json.Open('[');
    for (Communicator* const c : open) Write(c->State(100, 0), &json);
    return json.Close(']').text();
  });
  GiveStacks("stacks");
  signal(SIGUSR1, SIG_IGN);
  FlightLog::Instance().AskOnSignal(SIGUSR1);
  for (const int hosts : {1, 2}) {
    OnEachRank(Arranged(3, hosts, As::kThreads), [&](Communicator& c) {
      {
        const std::lock_guard<std::mutex> lock(mutex);
        open.push_back(&c);
      }
      for (int i = 0; i < 200; ++i) {
        Do(c, kKindsOfGroups[i % 6], 100);
        Ask(i % 2 ? "stall" : "waited", "one of many");
        if (i % 50 == c.rank()) kill(getpid(), SIGUSR1);
      }
      if (c.rank() == 0) c.Abort(Error(Code::kUnavailable, "given up"));
      ExpectError([&] { Do(c, Kind::kBarrier, 0); }, Code::kUnavailable, {"given up"});
      c.Close();
      Flush();
      EXPECT(Whole(Read(path)));
      const std::lock_guard<std::mutex> lock(mutex);
      open.erase(std::find(open.begin(), open.end(), &c));
    });
    EXPECT(Has(Read(path), R"("aborted":{"message":"given up",)"));
  }
  Ask("error", "the end");
  Flush();
  EXPECT(Has(Read(path), "the end") && Has(Read(path), R"("communicators":[])"));
}

void OfRanks(const std::string& kept) {
  Folder folder;
  const auto base = [&](const std::string& name) {
    if (!kept.empty()) {
      EXPECT(mkdir((kept + "/" + name).c_str(), 0700) == 0);
      return kept + "/" + name + "/flight-rank";
    }
    for (int rank = 0; rank < 3; ++rank) folder.File(name + std::to_string(rank) + ".json");
    return folder.path() + "/" + name;
  };
  std::vector<std::function<void()>> tests;
  for (const int hosts : {1, 2}) {
    const Plan plan = Arranged(3, hosts, As::kProcesses);
    const auto add = [&](const char* name, void (*test)(Plan, const std::string&)) {
      const std::string where = base(name + std::to_string(hosts));
      tests.push_back([=] { test(plan, where); });
    };
    add("error", [](Plan p, const std::string& at) { OneAborts(p, at); });
    add("mismatch", [](Plan p, const std::string& at) { AMismatch(p, at); });
    add("stall", AStall);
    add("signal", [](Plan p, const std::string& at) { ASignal(p, at); });
    add("nothing", [](Plan p, const std::string& at) { NothingHappens(p, at); });
  }
  // One after the other, each in its own process, since a process has one log.
  for (const auto& test : tests) InParallel({test});
}

void OfOneProcess() {
  InParallel({BeforeTheStart, ManyReasons, Stalls, Numbers, NowhereToWrite, NoRoom, NoMemory,
              Stacks, InAForkedChild});
  Atomic();
}

}  // namespace
}  // namespace tfdist::testing

int main(int argc, char** argv) {
  using namespace tfdist::testing;
  const std::string what = argc > 1 ? argv[1] : "";
  return Report([&] {
    if (what != "threads") OfRanks(what);
    if (what.empty()) OfOneProcess();
    if (what.empty() || what == "threads") FromAllSides();
  });
}
