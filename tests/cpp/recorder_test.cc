// Usage: recorder_test [cost [collectives]]
//
// The flight recorder: which records it keeps, in which order, and who arrived last; also read
// while it is written. With "cost", it prints the cost of a record.
#include "control/flight_log.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>

#include "cpp/calls.h"

namespace {

thread_local size_t allocations = 0;

}  // namespace

[[gnu::noinline]] void* operator new(size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace tfdist::testing {
namespace {

Fingerprint Named(const std::string& name, uint64_t sequence = 0) {
  Fingerprint fingerprint;
  fingerprint.kind = Kind::kAllReduce;
  fingerprint.type = DType::kFloat32;
  fingerprint.sequence = sequence;
  fingerprint.SetName(name);
  return fingerprint;
}

uint64_t Mark(const std::string& name) { return HashOf(Named(name)); }

void Begin(Recorder& recorder, const std::string& name = "x", uint64_t sequence = 0) {
  Recorder::Beginning beginning;
  beginning.enqueued = Nanoseconds();
  recorder.Begin(Named(name, sequence), beginning);
}

Record Last(Recorder& recorder) { return recorder.Read(1).records.at(0); }

void OrderAndWrap() {
  Recorder recorder({0, 1});
  EXPECT(recorder.Read().records.empty());
  constexpr uint64_t kMany = 2500;
  std::vector<int64_t> ended(kMany + 1);
  for (uint64_t i = 1; i <= kMany; ++i) {
    Begin(recorder, std::to_string(i), i);
    recorder.End(false);
    ended[i] = Last(recorder).ended;
  }
  const auto check = [&](const Recorder::Log& log, uint64_t count, uint64_t last) {
    EXPECT(log.records.size() == count && log.arrivals.size() == count);
    for (uint64_t i = 0; i < count; ++i) {
      const Record& record = log.records[i];
      EXPECT(record.number == last - count + 1 + i);
      EXPECT(record.fingerprint.name == std::to_string(record.number));
      EXPECT(record.ended == 0 || record.ended == ended[record.number]);
    }
  };
  check(recorder.Read(), Recorder::kRecords, kMany);
  check(recorder.Read(SIZE_MAX), Recorder::kRecords, kMany);
  check(recorder.Read(10), 10, kMany);
  check(recorder.Read(0), 0, kMany);
  // The running operation replaces the oldest record, and is always present.
  Begin(recorder, std::to_string(kMany + 1), kMany + 1);
  check(recorder.Read(), Recorder::kRecords, kMany + 1);
  EXPECT(Last(recorder).ended == 0);
  EXPECT(recorder.Read(10, INT64_MAX).records.size() == 1);
  for (const Record& record : recorder.Read(100, ended[kMany - 50]).records) {
    EXPECT(record.ended == 0 || record.ended >= ended[kMany - 50]);
  }
  EXPECT(recorder.Read(100, ended[kMany - 50]).records.size() >= 52);
}

void WhatItKeeps() {
  Recorder recorder({0, 1});
  Recorder::Beginning beginning;
  beginning.peer = 1;
  beginning.bytes = 40;
  beginning.enqueued = 7;
  recorder.Begin(Named("x", 3), beginning);
  recorder.Chose(2);
  recorder.BetweenHosts(true);
  recorder.BetweenHosts(false);
  recorder.Coded(5);
  recorder.Coded(6);
  recorder.End(true, 80);
  recorder.End(false);  // nothing is open
  const Record record = Last(recorder);
  EXPECT(recorder.Read().records.size() == 1);
  EXPECT(record.fingerprint.sequence == 3 && record.peer == 1 && record.enqueued == 7);
  EXPECT(record.bytes == 80 && record.algorithm == 2 && record.coding == 11 && record.failed);
  EXPECT(record.begun <= record.between_begun && record.between_begun <= record.between_ended);
  EXPECT(record.between_ended <= record.ended);
  // The next record keeps nothing of it.
  Begin(recorder);
  const Record next = Last(recorder);
  EXPECT(next.peer == -1 && next.last == -1 && next.bytes == 0 && next.algorithm == 0);
  EXPECT(!next.failed && !next.between_begun && !next.between_ended && !next.coding);
}

// Ranks 0 and 1 share a host, and so do 2 and 4; rank 3 is alone.
void Arrivals() {
  Recorder recorder({0, 0, 1, 2, 1});
  for (int round = 0; round < 2; ++round) {
    Begin(recorder);
    recorder.Arrived(1, false);
    EXPECT(Last(recorder).last == -1 && Last(recorder).last_arrived == 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    recorder.Arrived(2, true);
    const Record at_first = Last(recorder);
    EXPECT(at_first.last == 2 && at_first.last_arrived >= at_first.begun + 2'000'000);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    recorder.Arrived(4, true);
    const Record then = Last(recorder);
    EXPECT(then.last == 4 && then.last_arrived >= at_first.last_arrived + 2'000'000);
    // Only the first call for a rank counts.
    recorder.Arrived(2, true);
    recorder.Arrived(1, true);
    EXPECT(Last(recorder).last == 4 && Last(recorder).last_arrived == then.last_arrived);
    recorder.End(false);
    const std::vector<int64_t> arrivals = recorder.Read(1).arrivals.at(0);
    const int64_t first = (at_first.last_arrived - at_first.begun) / 1000;
    EXPECT((arrivals == std::vector<int64_t>{0, first, -1}));
  }
}

// An operation is queued from the time when all its inputs exist, even if it is requested later.
void QueuedByMarks() {
  Recorder recorder({0, 1});
  const int64_t before = Nanoseconds();
  recorder.Ready(Mark("marked"), false);
  const int64_t after = Nanoseconds();
  Begin(recorder, "other");
  EXPECT(Last(recorder).enqueued >= after);
  recorder.End(false);
  Begin(recorder, "marked");
  EXPECT(Last(recorder).enqueued >= before && Last(recorder).enqueued <= after);
  recorder.End(false);
  // A mark counts once.
  Begin(recorder, "marked");
  EXPECT(Last(recorder).enqueued >= after);
  recorder.End(false);
  // Too many marks: the oldest one is dropped.
  recorder.Ready(Mark("marked"), false);
  for (int i = 0; i < 64; ++i) recorder.Ready(Mark(std::to_string(i)), false);
  const int64_t later = Nanoseconds();
  Begin(recorder, "marked");
  EXPECT(Last(recorder).enqueued >= later);
  recorder.End(false);
  Begin(recorder, "63");
  EXPECT(Last(recorder).enqueued <= later);
  recorder.End(false);
}

// A rank that arrives when all others wait is the last one on every rank. Between hosts, it may be
// observed through the rank that has waited for it.
void WhoCameLast(int ranks, int hosts, int late) {
  std::atomic<int> waiting{0};
  OnEachRank(Arranged(ranks, hosts, As::kThreads), [&](Communicator& c) {
    Do(c, Kind::kAllReduce, 10);
    if (c.rank() == late) {
      while (waiting < ranks - 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
    } else {
      ++waiting;
    }
    Do(c, Kind::kAllReduce, 10);
    const Recorder::Log log = c.recorder().Read();
    EXPECT(log.records.size() == 2);
    const Record& record = log.records[1];
    EXPECT(record.fingerprint.sequence == 2 && record.bytes == 40 && !record.failed);
    EXPECT(record.enqueued <= record.begun && record.begun <= record.ended);
    EXPECT(hosts == 1 ||
           (record.begun <= record.between_begun && record.between_begun <= record.between_ended));
    for (int host = 0; host < hosts; ++host) {
      // A rank that is alone on its host observes only arrivals from other hosts.
      const bool own = c.rank() % hosts == host;
      EXPECT((own && hosts > 1) || log.arrivals[1][static_cast<size_t>(host)] >= 0);
    }
    if (c.rank() == late) return;
    EXPECT(record.last_arrived > record.begun && record.last_arrived <= record.ended);
    EXPECT(record.last == late || record.last % hosts == late % hosts);
    if (hosts == 1 || c.rank() % hosts == late % hosts) EXPECT(record.last == late);
  });
}

// A failed operation also has a record, with an end.
void Failed() {
  OnEachRank(Arranged(2, 1, As::kThreads), [](Communicator& c) {
    ExpectError([&] { Do(c, c.rank() ? Kind::kBarrier : Kind::kAllReduce, 10); }, Code::kMismatch,
                {});
    const Record record = Last(c.recorder());
    EXPECT(record.failed && record.ended >= record.begun && record.number == 1);
  });
}

// The sizes of a gather's result are known only during the operation.
void BytesOfAnAllocatedResult() {
  OnEachRank(Arranged(2, 1, As::kThreads), [](Communicator& c) {
    Call call(c, Kind::kAllGather, 10);
    std::vector<char> room;
    call.operation.row_bytes = 1;
    call.operation.out = BufferList();
    call.operation.received_rows.clear();
    call.operation.allocate = [&](const std::vector<size_t>& rows) {
      room.resize(rows[0] + rows[1]);
      return BufferList(room.data(), room.size());
    };
    c.Run(std::move(call.operation));
    EXPECT(Last(c.recorder()).bytes == 80);
  });
}

void ReadWhileWritten() {
  Recorder recorder({0, 0, 1, 2});
  std::atomic<bool> over{false};
  std::vector<std::string> failures(2);
  std::vector<std::thread> readers;
  for (auto& failure : failures) {
    readers.emplace_back([&] {
      try {
        while (!over) {
          const Recorder::Log log = recorder.Read();
          for (size_t i = 0; i < log.records.size(); ++i) {
            const Record& record = log.records[i];
            const bool last = i + 1 == log.records.size();
            EXPECT(record.fingerprint.sequence == record.number);
            EXPECT(last || record.number + 1 == log.records[i + 1].number);
            EXPECT(last || record.ended >= record.begun);
            EXPECT(record.last == -1 || record.last_arrived >= record.begun);
            EXPECT(log.arrivals[i].size() == 3);
          }
        }
      } catch (const Failure& what) { failure = what.what(); }
    });
  }
  std::thread marks([&] {
    while (!over) {
      recorder.Ready(Mark("x"), true);
      recorder.Stalls();
    }
  });
  for (uint64_t i = 1; i <= 5000; ++i) {
    Begin(recorder, "x", i);
    recorder.Chose(1);
    for (int rank = 1; rank < 4; ++rank) recorder.Arrived(rank, rank == 3);
    recorder.End(false);
  }
  over = true;
  for (auto& reader : readers) reader.join();
  marks.join();
  for (const auto& failure : failures) {
    if (!failure.empty()) throw Failure(failure);
  }
}

// One collective of nine ranks on two hosts, which wait for one of them.
void Entry(Recorder& recorder, uint64_t sequence) {
  Begin(recorder, "gradients", sequence);
  recorder.Chose(1);
  for (int rank = 1; rank < 9; ++rank) recorder.Arrived(rank, rank == 8);
  recorder.BetweenHosts(true);
  recorder.BetweenHosts(false);
  recorder.Coded(1);
  recorder.End(false);
}

void NoAllocation() {
  Recorder recorder({0, 0, 0, 0, 0, 1, 1, 1, 1});
  Activity::Instance();
  const std::string name = "x";
  const uint64_t mark = Mark(name);
  const size_t before = allocations;
  for (uint64_t i = 1; i <= 2000; ++i) {
    recorder.Ready(mark, false);
    Entry(recorder, i);
  }
  EXPECT(allocations == before);
  recorder.Read();
  EXPECT(allocations > before);  // they are counted
}

void All() {
  OrderAndWrap();
  WhatItKeeps();
  Arrivals();
  QueuedByMarks();
  Failed();
  BytesOfAnAllocatedResult();
  ReadWhileWritten();
  NoAllocation();
  for (const int late : {1, 2}) {
    WhoCameLast(3, 1, late);
    WhoCameLast(3, 3, late);
    WhoCameLast(4, 2, late);
  }
}

template <typename Do>
void Time(const char* what, uint64_t times, Do once) {
  const int64_t begin = Nanoseconds();
  for (uint64_t i = 1; i <= times; ++i) once(i);
  const double each = static_cast<double>(Nanoseconds() - begin) / static_cast<double>(times);
  std::printf("%-52s %6.0f ns\n", what, each);
}

void Cost(uint64_t times) {
  Recorder recorder({0, 0, 0, 0, 0, 1, 1, 1, 1});
  Time("the clock, read once", times, [](uint64_t) { (void)Nanoseconds(); });
  const auto least = [&](uint64_t i) {
    Recorder::Beginning beginning;
    recorder.Begin(Named("gradients", i), beginning);
    recorder.End(false);
  };
  Time("a collective: begin, end", times, least);
  Time("with 8 ranks that arrive, all that it keeps", times,
       [&](uint64_t i) { Entry(recorder, i); });
  const uint64_t mark = Mark("gradients");
  recorder.Ready(mark, false);
  Time("begin, end, once there have been marks", times, least);
  Time("a mark", times, [&](uint64_t) { recorder.Ready(mark, false); });
}

}  // namespace
}  // namespace tfdist::testing

int main(int argc, char** argv) {
  using namespace tfdist::testing;
  if (argc > 1 && argv[1] == std::string("cost")) {
    Cost(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1000000);
    return 0;
  }
  return Report(All);
}
