// The state that communicators report to other threads: while they work, wait, fail and close.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "cpp/calls.h"

namespace tfdist::testing {
namespace {

std::string Text(Communicator& c) {
  JsonWriter json;
  Write(c.State(Recorder::kRecords, 0), &json);
  return json.text();
}

bool Has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void Nap() { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }

void Alone() {
  Plan plan;
  plan.ranks = 1;
  OnEachRank(plan, [](Communicator& c) {
    EXPECT(Has(Text(c), R"("peers":[],"links":[],"records":[])"));
    Do(c, Kind::kAllReduce, 10, "only");
    const std::string text = Text(c);
    EXPECT(Has(text, R"({"name":"test","rank":0,"size":1,"ranks":["rank 0"],"hosts":[0],)"
                     R"("aborted":null,"queued":[],)"));
    EXPECT(Has(text, R"("kind":"all_reduce","what":"all_reduce 'only' float32[10] sum",)"
                     R"("name":"only","type":"float32","shape":[10],"tensors":1,"elements":10,)"));
    EXPECT(c.links().size() == 1 && c.links()[0].acknowledged_bytes == 0);
  });
}

// One rank waits in a collective, with others in the queue; the other rank sees it.
void WhoWaits() {
  Plan plan;
  plan.silence_warning_seconds = 1;  // sends statuses five times as often
  OnEachRank(plan, [](Communicator& c) {
    if (c.rank() == 0) {
      Call first(c, Kind::kAllReduce, 10, "first"), second(c, Kind::kBroadcast, 10, "second");
      c.Enqueue(std::move(first.operation), [](const Error*) {});
      c.Enqueue(std::move(second.operation), [](const Error*) {});
      while (!Has(Text(c), R"("queued":["broadcast 'second')")) Nap();
      EXPECT(Has(Text(c), R"("ended_ns":0)"));
      Do(c, Kind::kBarrier, 0);
      EXPECT(!Has(Text(c), R"("ended_ns":0)") && Has(Text(c), R"("queued":[])"));
    } else {
      while (!Has(Text(c), R"("sequence":1,"in":"all_reduce 'first' float32[10] sum")")) Nap();
      Do(c, Kind::kAllReduce, 10, "first");
      Do(c, Kind::kBroadcast, 10, "second");
      Do(c, Kind::kBarrier, 0);
    }
  });
}

// Names from a program, with other characters and too long, keep the text valid.
void Names() {
  Plan plan;
  plan.ranks = 1;
  OnEachRank(plan, [](Communicator& c) {
    std::string name;
    for (int i = 0; i < 40; ++i) name += "\xc3\xb6";
    Do(c, Kind::kAllReduce, 10, name + "yx\"");
    const std::string text = Text(c);
    EXPECT(Has(text, R"("name":"\ufffd)") && Has(text, "\xc3\xb6yx\\\"\""));
  });
}

void Failed() {
  Plan plan;
  OnEachRank(plan, [](Communicator& c) {
    if (c.rank() == 1) c.Abort(Error(Code::kUnavailable, "given up"));
    ExpectError([&] { Do(c, Kind::kAllReduce, 10); }, Code::kUnavailable, {"given up"});
    const std::string text = Text(c);
    EXPECT(Has(text, R"("aborted":{"message":"given up","code":3,"event":"other","worker":"",)"));
    EXPECT(Has(text, R"("detected":{"operation":"all_reduce 'x' float32[10] sum","rank":)" +
                         std::to_string(c.rank()) + R"(,"sequence":1,"begun_ns":)"));
    EXPECT(Has(text, R"("failed":true)"));
  });
}

// Threads read all state until the communicators have been closed, and once more.
void ReadUntilClosed(int ranks, int hosts) {
  std::atomic<int> closed{0};
  OnEachRank(Arranged(ranks, hosts, As::kThreads), [&](Communicator& c) {
    std::atomic<bool> over{false}, started{false};
    std::string failure;
    std::thread reader([&] {
      try {
        for (bool once_more = true; once_more;) {
          once_more = !over;
          EXPECT(Text(c).back() == '}');
          EXPECT(c.links().size() == static_cast<size_t>(ranks));
          (void)c.statistics();
          started = true;
        }
      } catch (const Failure& what) { failure = what.what(); }
    });
    for (int i = 0; i < 50; ++i) Do(c, kKindsOfGroups[i % 6], 100 * static_cast<size_t>(i));
    while (!started) Nap();
    for (int other = 0; other < ranks; ++other) {
      const bool away = other % hosts != c.rank() % hosts;
      EXPECT(away || c.links()[static_cast<size_t>(other)].acknowledged_bytes == 0);
      EXPECT(away == Has(Text(c), R"({"rank":)" + std::to_string(other) + R"(,"acknowledged_)"));
      if (away && hosts == ranks) {
        // The first data have been acknowledged, since the other rank has answered.
        EXPECT(c.links()[static_cast<size_t>(other)].acknowledged_bytes > 0);
      }
    }
    c.Close();
    over = true;
    reader.join();
    if (!failure.empty()) throw Failure(failure);
    EXPECT(c.statistics().collectives == 50);
    // Links no longer count.
    for (const TcpStatistics& link : c.links()) EXPECT(link.acknowledged_bytes == 0);
    ++closed;
  });
  EXPECT(closed == ranks);
}

// Unread data stay pending.
void Pending() {
  const int listener = socket(AF_INET, SOCK_STREAM, 0), writer = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  EXPECT(bind(listener, any, length) == 0 && listen(listener, 1) == 0);
  EXPECT(getsockname(listener, any, &length) == 0 && connect(writer, any, length) == 0);
  const int reader = accept(listener, nullptr, nullptr);
  EXPECT(ReadTcpStatistics(writer).pending_bytes == 0);
  const std::vector<char> data(1 << 20);
  size_t written = 0;
  for (ssize_t n = 0; n >= 0; n = send(writer, data.data(), data.size(), MSG_DONTWAIT)) {
    written += static_cast<size_t>(n);
  }
  const TcpStatistics full = ReadTcpStatistics(writer);
  EXPECT(full.pending_bytes > 0 && full.pending_bytes + full.acknowledged_bytes >= written);
  std::vector<char> read(written);
  EXPECT(recv(reader, read.data(), read.size(), MSG_WAITALL) == static_cast<ssize_t>(written));
  while (ReadTcpStatistics(writer).pending_bytes > 0) Nap();
  EXPECT(ReadTcpStatistics(writer).acknowledged_bytes >= written);
  for (const int descriptor : {listener, writer, reader}) close(descriptor);
  EXPECT(ReadTcpStatistics(-1).pending_bytes == 0);
}

void All() {
  Alone();
  Pending();
  WhoWaits();
  Names();
  Failed();
  ReadUntilClosed(2, 1);
  ReadUntilClosed(2, 2);
  ReadUntilClosed(4, 2);
}

}  // namespace
}  // namespace tfdist::testing

int main() { return tfdist::testing::Report(tfdist::testing::All); }
