// Orders that look like a mismatch for a while but are none; and a mismatch that is hard to see.
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "control/watch.h"
#include "cpp/calls.h"
#include "error.h"
#include "transport/socket.h"

namespace tfdist::testing {
namespace {

void Sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

void Call(Communicator& group, Kind kind, std::vector<float>& values, int peer = -1) {
  const size_t bytes = values.size() * sizeof(float);
  Operation operation;
  operation.fingerprint.kind = kind;
  operation.fingerprint.type = DType::kFloat32;
  operation.fingerprint.AddShape({static_cast<int64_t>(values.size())});
  operation.peer = peer;
  operation.fingerprint.root = kind == Kind::kBroadcast ? 1 : 0;
  if (kind != Kind::kReceive)
    operation.in = ConstBufferList(reinterpret_cast<char*>(values.data()), bytes);
  if (kind != Kind::kSend)
    operation.out = BufferList(reinterpret_cast<char*>(values.data()), bytes);
  group.Run(std::move(operation));
}

// The sender's last status says that it sends, long after that has ended.
void ASlowMessageBeforeACollective(int hosts) {
  Plan plan;
  plan.hosts = hosts;
  OnEachRank(plan, [](Communicator& group) {
    std::vector<float> message(1 << 20, 1.0f), values(10, 1.0f);
    if (group.rank() == 1) {
      Call(group, Kind::kSend, message, 0);
      Sleep(1.5);
    } else {
      Sleep(0.35);
      Call(group, Kind::kReceive, message, 1);
    }
    Call(group, Kind::kAllReduce, values);
    EXPECT(values[0] == 2.0f);
  });
}

// A rank's message arrives although the rank has left.
void AMessageOfOneWhoHasLeft(int hosts) {
  Plan plan;
  plan.hosts = hosts;
  OnEachRank(plan, [](Communicator& group) {
    std::vector<float> message(1000, static_cast<float>(group.rank()));
    if (group.rank() == 1) {
      Sleep(0.8);
      Call(group, Kind::kSend, message, 0);
      group.Close();
    } else {
      Call(group, Kind::kReceive, message, 1);
      EXPECT(message[999] == 1.0f);
    }
  });
}

// Rank 1 waits in a message for rank 0, which may still be in the preceding collective.
void AMessageAfterACollective() {
  Plan plan;
  plan.ranks = plan.hosts = 4;
  OnEachRank(plan, [](Communicator& group) {
    std::vector<float> values(10, static_cast<float>(group.rank())), message(1, 1.0f);
    // Rank 0 receives the data of the root, rank 1, through one of these ranks.
    if (group.rank() > 1) Sleep(0.6);
    Call(group, Kind::kBroadcast, values);
    if (group.rank() == 1) Call(group, Kind::kReceive, message, 0);
    if (group.rank() == 0) Call(group, Kind::kSend, message, 1);
    EXPECT(values[9] == 1.0f && message[0] == 1.0f);
  });
}

// Rank 1 waits in a message for rank 0, which is in collective 5. That is no mismatch if rank 1 has
// joined collective 5, and one if it has joined only collective 4.
void AMessageBesideACollective() {
  int ends[2];
  EXPECT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
  std::atomic<int> ticks{0};
  std::atomic<bool> given_up{false};
  Watch::Settings settings;
  settings.names = {"rank 0", "rank 1"};
  settings.silence_warning_seconds = settings.silence_timeout_seconds = 3600;
  Doing doing;
  doing.status.active = true;
  doing.status.sequence = 5;
  doing.status.fingerprint.kind = Kind::kBroadcast;
  doing.since = Clock::now() - std::chrono::seconds(1);
  Watch::Callbacks callbacks{
      [&] { return doing; },
      [](uint64_t, Fingerprint*) { return false; },
      [](int, const Fingerprint&) { return false; },
      [] {},
      [&](const Error& cause) { given_up = cause.code() == Code::kMismatch; },
      [](const std::string&) {},
      [](const std::string&) {},
      [](const std::string&) {},
      [&] { ++ticks; }};
  Streams streams(2);
  streams[1] = std::make_unique<Socket>(ends[0]);
  Watch watch(std::move(settings), std::move(streams), std::move(callbacks));
  watch.Start();
  for (const uint64_t joined : {5, 4}) {
    Frame frame;
    frame.status.active = true;
    frame.status.sequence = joined;
    frame.status.peer = 0;
    frame.status.fingerprint.kind = Kind::kReceive;
    const std::string bytes = Encode(frame);
    EXPECT(write(ends[1], bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
    // By the second tick the frame has been read, by the third it has been judged.
    for (const int enough = ticks + 3; ticks < enough;) Sleep(0.01);
    EXPECT(given_up == (joined < 5));
  }
  watch.Stop();
  close(ends[1]);
}

void AnotherAlgorithm(int hosts, const std::vector<std::string>& algorithms) {
  Plan plan;
  plan.ranks = static_cast<int>(algorithms.size());
  plan.hosts = hosts;
  plan.algorithms = algorithms;
  OnEachRank(plan, [](Communicator& group) {
    std::vector<float> values(100000, 1.0f);
    try {
      Call(group, Kind::kAllReduce, values);
    } catch (const Error& error) {
      EXPECT(error.code() == Code::kMismatch);
      EXPECT(std::string(error.what()).find("TFDIST_ALGORITHM differs") != std::string::npos);
      return;
    }
    throw Failure("Ranks with different algorithms got a result.");
  });
}

}  // namespace
}  // namespace tfdist::testing

int main() {
  using namespace tfdist::testing;
  std::vector<std::function<void()>> tests{AMessageAfterACollective, AMessageBesideACollective};
  for (const int hosts : {1, 2}) {
    tests.push_back([=] { ASlowMessageBeforeACollective(hosts); });
    tests.push_back([=] { AMessageOfOneWhoHasLeft(hosts); });
    tests.push_back([=] { AnotherAlgorithm(hosts, {"one_shot", "two_shot", "two_shot"}); });
    tests.push_back([=] { AnotherAlgorithm(hosts, {"", "ring", ""}); });
    tests.push_back([=] { AnotherAlgorithm(hosts, {"hierarchical", "ring"}); });
  }
  return Report([&] { InParallel(tests); });
}
