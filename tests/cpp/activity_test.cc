// How a process has spent the time of its steps: each case is compared with the times in the
// records and spans.
#include "control/activity.h"

#include <functional>
#include <thread>

#include "control/flight_log.h"
#include "cpp/calls.h"

namespace tfdist::testing {
namespace {

constexpr bool kOverlaps = false, kStalls = true;

Activity::Totals Totals() { return Activity::Instance().Read(); }

void Sleep() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

// A recorder of two ranks, and the times counted from now on.
struct Counted {
  Recorder recorder{std::vector<int>{0, 1}};
  const Activity::Totals before = Totals();

  int64_t waiting() const { return Totals().waiting - before.waiting; }
  int64_t moving() const { return Totals().moving - before.moving; }

  void Begin(const std::string& name, bool stalls) {
    Fingerprint fingerprint;
    fingerprint.kind = Kind::kAllReduce;
    fingerprint.SetName(name);
    Recorder::Beginning beginning;
    beginning.enqueued = Nanoseconds();
    beginning.stalls = stalls;
    Sleep();
    recorder.Begin(fingerprint, beginning);
    Sleep();
  }
  // The other rank has arrived.
  void Arrive() {
    recorder.Arrived(1, true);
    Sleep();
  }
  Record End(bool failed = false) {
    recorder.End(failed);
    return recorder.Read(1).records.at(0);
  }
  // Calls a function of the recorder; returns the times before and after.
  std::pair<int64_t, int64_t> Tell(const std::function<void()>& what) {
    const int64_t before_it = Nanoseconds();
    what();
    const int64_t after_it = Nanoseconds();
    Sleep();
    return {before_it, after_it};
  }
  std::pair<int64_t, int64_t> Ready(const std::string& name, bool stalls) {
    Fingerprint fingerprint;
    fingerprint.SetName(name);
    return Tell([&] { recorder.Ready(HashOf(fingerprint), stalls); });
  }
  std::pair<int64_t, int64_t> Stall() {
    return Tell([&] { recorder.Stalls(); });
  }
};

// Whether a counted time spans from between two times to an end.
bool Lasted(int64_t counted, std::pair<int64_t, int64_t> from, int64_t to) {
  return counted >= to - from.second && counted <= to - from.first;
}

// A step waits for a collective: for the other ranks until they have arrived, then for data.
void OneThatStalls() {
  Counted c;
  c.Begin("x", kStalls);
  c.Arrive();
  const Record record = c.End();
  EXPECT(c.waiting() == record.last_arrived - record.begun);
  EXPECT(c.moving() == record.ended - record.last_arrived);
}

void NobodyWasLate() {
  Counted c;
  c.Begin("x", kStalls);
  const Record record = c.End();
  EXPECT(c.waiting() == 0 && c.moving() == record.ended - record.begun);
}

void OneThatOverlaps() {
  Counted c;
  c.Begin("x", kOverlaps);
  c.Arrive();
  c.End();
  EXPECT(c.waiting() == 0 && c.moving() == 0);
}

// The step continues during the collective for a while.
void OneThatOverlapsAtFirst() {
  {
    Counted c;
    c.Begin("x", kOverlaps);
    const auto told = c.Stall();
    c.Stall();  // changes nothing
    c.Arrive();
    const Record record = c.End();
    EXPECT(Lasted(c.waiting(), told, record.last_arrived));
    EXPECT(c.moving() == record.ended - record.last_arrived);
  }
  Counted c;
  c.Begin("x", kOverlaps);
  c.Arrive();
  const auto told = c.Stall();
  const Record record = c.End();
  EXPECT(c.waiting() == 0 && Lasted(c.moving(), told, record.ended));
}

// There was nothing to wait for.
void AStallBesideNothing() {
  Counted c;
  c.Stall();
  c.Begin("x", kOverlaps);
  c.End();
  EXPECT(c.waiting() == 0 && c.moving() == 0);
}

// The step waits from its last gradient on, also for the collectives before the last one.
void TheLastOfSeveral() {
  Counted c;
  c.Ready("first", kOverlaps);
  c.Begin("first", kOverlaps);
  const auto told = c.Ready("last", kStalls);
  const Record first = c.End();
  EXPECT(c.waiting() == 0 && Lasted(c.moving(), told, first.ended));
  const int64_t so_far = c.moving();
  c.Begin("last", kStalls);
  const Record last = c.End();
  EXPECT(c.waiting() == 0 && c.moving() == so_far + last.ended - last.begun);
  c.Begin("of the next step", kOverlaps);
  c.End();
  EXPECT(c.moving() == so_far + last.ended - last.begun);
}

// A collective that a step waits for may never begin after another one has failed.
void AFailure() {
  Counted c;
  c.Begin("first", kOverlaps);
  const auto told = c.Ready("last", kStalls);
  const Record first = c.End(true);
  const int64_t so_far = c.moving();
  EXPECT(Lasted(so_far, told, first.ended));
  c.Begin("of the next step", kOverlaps);
  c.End();
  EXPECT(c.moving() == so_far);
  // Only successful operations count as moved.
  constexpr auto kAllReduce = static_cast<size_t>(Kind::kAllReduce);
  EXPECT(Totals().operations[kAllReduce] == c.before.operations[kAllReduce] + 1);
}

// A step has failed after it marked its collectives as ready, and they never begin.
void AFailureOfTheStep() {
  Counted c;
  c.Ready("first", kOverlaps);
  c.Ready("second", kOverlaps);
  c.Stall();
  c.Ready("last", kStalls);
  c.recorder.Forget();
  const int64_t forgotten = Nanoseconds();
  c.Begin("first", kOverlaps);
  const Record first = c.End();
  EXPECT(c.waiting() == 0 && c.moving() == 0);
  EXPECT(first.enqueued >= forgotten);
  // A pending wait of another step continues.
  c.Begin("of another step", kStalls);
  c.recorder.Forget();
  const Record other = c.End();
  EXPECT(c.moving() == other.ended - other.begun);
}

void NobodyRecords() {
  Counted c;
  Recorder::SetRecording(false);
  c.Ready("first", kOverlaps);
  c.Ready("last", kStalls);
  Recorder::SetRecording(true);
  c.Begin("of the next step", kOverlaps);
  c.Stall();
  const Record record = c.End();
  c.Begin("of the step after", kOverlaps);
  c.End();
  EXPECT(c.waiting() == 0 && c.moving() > 0 && c.moving() <= record.ended - record.begun);
}

// Two communicators stall the process at the same time, which counts once.
void TwoAtOnce() {
  Counted a, b;
  a.Begin("x", kStalls);
  b.Begin("x", kStalls);
  const Record first = a.End();
  Sleep();
  const Record second = b.End();
  EXPECT(a.waiting() == 0 && a.moving() == second.ended - first.begun);
}

void Input() {
  Activity& activity = Activity::Instance();
  const Activity::Totals before = Totals();
  const int64_t begin = Nanoseconds();
  activity.InputBegins();
  EXPECT(Totals().input_since >= begin && Totals().input_since <= Nanoseconds());
  Sleep();
  activity.InputEnds();
  const Activity::Totals once = Totals();
  EXPECT(once.input_since == 0);
  EXPECT(once.steps == before.steps + 1 && once.input - before.input >= 1'000'000);
  // A batch that nobody waited for adds no time.
  activity.InputEnds();
  EXPECT(Totals().steps == once.steps + 1 && Totals().input == once.input);
}

// An operation that needs the input may begin to wait, and end, before the end of the input is
// recorded.
void InputThatIsNotedLate() {
  Activity& activity = Activity::Instance();
  const Activity::Totals before = Totals();
  const int64_t begin = Nanoseconds();
  activity.InputBegins();
  const int64_t begun = Nanoseconds();
  Sleep();
  const int64_t came = Nanoseconds();
  Sleep();
  const int64_t end = Nanoseconds();
  activity.Stalled(came, end, end);
  Sleep();
  activity.InputEnds();
  const Activity::Totals after = Totals();
  EXPECT(after.waiting == before.waiting + end - came);
  EXPECT(Lasted(after.input - before.input, {begin, begun}, came));
  EXPECT(after.steps == before.steps + 1);
}

// The step waits for a collective that is ready and has not begun.
void OneThatIsToBegin() {
  Counted c;
  c.Ready("x", kOverlaps);
  c.Stall();
  c.Begin("x", kOverlaps);
  c.Arrive();
  const Record record = c.End();
  EXPECT(c.waiting() == record.last_arrived - record.begun);
  EXPECT(c.moving() == record.ended - record.last_arrived);
}

void BusBytes() {
  constexpr struct {
    Kind kind;
    double share;
  } kShares[] = {{Kind::kAllReduce, 1.5}, {Kind::kReduceScatter, 0.75}, {Kind::kAllGather, 0.75},
                 {Kind::kAllToAll, 0.75}, {Kind::kBroadcast, 1},        {Kind::kBarrier, 0},
                 {Kind::kSend, 1},        {Kind::kReceive, 1}};
  for (const auto& [kind, share] : kShares) {
    const Activity::Totals before = Totals();
    Activity::Instance().Ended(kind, 1000, 4, 5);
    const Activity::Totals after = Totals();
    EXPECT(after.bus_bytes == before.bus_bytes + 1000 * share);
    EXPECT(after.bus_moving == before.bus_moving + 5);
    const auto i = static_cast<size_t>(kind);
    EXPECT(after.operations[i] == before.operations[i] + 1);
  }
  const double before = Totals().bus_bytes;
  Activity::Instance().Ended(Kind::kAllReduce, 1000, 1, 5);
  EXPECT(Totals().bus_bytes == before);
}

void SpansOfAStep() {
  Spans& spans = Spans::Instance();
  constexpr size_t kMax = 1 << 18;
  spans.Add("lane", "nobody asks", 1, 2);
  { const SpanScope scope("lane", "nobody asks"); }
  EXPECT(spans.Read().empty());
  spans.Record(true);
  Activity::Instance().InputBegins();
  Activity::Instance().InputEnds();
  Counted c;
  c.Begin("x", kStalls);
  c.Arrive();
  const Record record = c.End();
  { const SpanScope scope("compression", "select"); }
  const auto all = spans.Read();
  EXPECT(all.size() == 4);
  EXPECT(all[0].lane == "input" && all[0].name == "input" && all[0].begin <= all[0].end);
  EXPECT(all[1].lane == "waiting" && all[1].name == "workers" && all[1].begin == record.begun &&
         all[1].end == record.last_arrived);
  EXPECT(all[2].name == "network" && all[2].begin == record.last_arrived &&
         all[2].end == record.ended);
  EXPECT(all[3].lane == "compression" && all[3].begin <= all[3].end);
  for (size_t i = 0; i < kMax; ++i) spans.Add("lane", "many", 1, 2);
  EXPECT(spans.Read().size() == kMax);
  spans.Record(false);
  EXPECT(spans.Read().empty());
}

void All() {
  OneThatStalls();
  NobodyWasLate();
  OneThatOverlaps();
  OneThatOverlapsAtFirst();
  AStallBesideNothing();
  TheLastOfSeveral();
  AFailure();
  AFailureOfTheStep();
  NobodyRecords();
  TwoAtOnce();
  Input();
  InputThatIsNotedLate();
  OneThatIsToBegin();
  BusBytes();
  SpansOfAStep();
}

}  // namespace
}  // namespace tfdist::testing

int main() { return tfdist::testing::Report(tfdist::testing::All); }
