// The offset of another rank's clock: from round trips of every kind, and between two ranks.
#include "control/watch.h"

#include <cmath>
#include <cstdlib>
#include <limits>
#include <random>
#include <thread>

#include "cpp/calls.h"

namespace tfdist::testing {
namespace {

constexpr int64_t kMillisecond = 1'000'000, kSecond = 1'000'000'000;
constexpr int64_t kRounding = 2;  // nanoseconds, from halving

// The round trip that this rank observes if the other clock is ahead by `ahead` and frames take the
// given times.
RoundTrip Trip(int64_t sent, int64_t ahead, int64_t there, int64_t dwell, int64_t back) {
  const int64_t received = sent + there;
  return {sent, received + ahead, received + dwell + ahead, received + dwell + back};
}

void OneTrip() {
  constexpr struct {
    int64_t ahead, there, dwell, back;
  } kTrips[] = {
      {0, 100, 0, 100},
      {5 * kSecond, 100'000, kSecond, 100'000},
      {-5 * kSecond, 100'000, kSecond, 100'000},
      {123'456'789, kMillisecond, kMillisecond, 0},  // the whole delay on the way there
      {123'456'789, 0, kMillisecond, kMillisecond},  // the whole delay on the way back
      {-7, 3 * kSecond, 0, 1},
      {1, 1, 1, 1},
  };
  for (const auto& [ahead, there, dwell, back] : kTrips) {
    ClockOffset clock;
    EXPECT(!clock.measured());
    const RoundTrip trip = Trip(100 * kSecond, ahead, there, dwell, back);
    clock.Add(trip);
    EXPECT(clock.measured());
    const int64_t wrong = clock.uncertainty(trip.came);
    EXPECT(std::abs(clock.offset() - ahead) <= wrong + kRounding);
    // The error is at most half of the transmission times, plus 50 ppm of the whole round trip.
    EXPECT(wrong <= (there + back) / 2 + (trip.came - trip.sent) / 20000 + kRounding);
    EXPECT(clock.uncertainty(trip.came - kSecond) == wrong);
    EXPECT(clock.uncertainty(trip.came + 100 * kSecond) == wrong + 5 * kMillisecond);
  }
}

void TheBestTripCounts() {
  ClockOffset clock;
  clock.Add(Trip(kSecond, 500, 10 * kMillisecond, 0, 2 * kMillisecond));
  const int64_t first = clock.offset();
  EXPECT(first != 500);
  clock.Add(Trip(2 * kSecond, 500, 1000, 0, 1000));
  EXPECT(clock.offset() == 500);
  // Worse round trips do not change it, however often they occur,
  for (int i = 3; i < 10; ++i) {
    clock.Add(Trip(i * kSecond, 500, 10 * kMillisecond, 0, 2 * kMillisecond));
    EXPECT(clock.offset() == 500);
  }
  // until the best one is old.
  clock.Add(Trip(1000 * kSecond, 500, 10 * kMillisecond, 0, 2 * kMillisecond));
  EXPECT(clock.offset() == first);
}

void Nonsense() {
  const RoundTrip right = Trip(kSecond, 500, 1000, 10, 1000);
  const auto refused = [&](const std::function<void(RoundTrip&)>& change) {
    RoundTrip trip = right;
    change(trip);
    ClockOffset clock;
    clock.Add(trip);
    EXPECT(!clock.measured());
  };
  refused([](RoundTrip& t) { t.sent = 0; });  // nothing has been echoed so far
  refused([](RoundTrip& t) { t.received = 0; });
  refused([](RoundTrip& t) { t.answered = 0; });
  refused([](RoundTrip& t) { t.sent = t.came + 1; });
  refused([](RoundTrip& t) { t.answered = t.received + kSecond; });
}

// A clock that drifts by up to 50 ppm, over frames of any delay: the error stays within the
// reported uncertainty.
void Drift() {
  std::mt19937_64 random(1);
  const auto any = [&](int64_t most) { return static_cast<int64_t>(random() % (most + 1)); };
  for (int round = 0; round < 300; ++round) {
    ClockOffset clock;
    const double rate = static_cast<double>(any(96) - 48) * 1e-6;
    const int64_t ahead = any(2000 * kSecond) - 1000 * kSecond;
    int64_t now = 10000 * kSecond;
    const int64_t begin = now;
    const auto off = [&](int64_t at) {
      return ahead + std::llround(rate * static_cast<double>(at - begin));
    };
    for (int i = 0; i < 100; ++i) {
      const int64_t most = i % 10 ? 100 * kMillisecond : 100'000;
      const int64_t sent = now, received = sent + any(most), answered = received + any(kSecond);
      const int64_t came = answered + any(most);
      clock.Add({sent, received + off(received), answered + off(answered), came});
      now = came + any(i % 7 ? kSecond : 1000 * kSecond);
      EXPECT(clock.measured());
      EXPECT(std::abs(clock.offset() - off(now)) <= clock.uncertainty(now) + kRounding);
    }
  }
}

// The mean delay of a frame is right, up to the error of the offset.
void Delays() {
  ClockOffset clock;
  OneWayDelay delay;
  delay.Add(kSecond, 2 * kSecond, clock);  // before clocks have been compared
  delay.Add(0, 2 * kSecond, clock);
  EXPECT(delay.frames() == 0 && delay.nanoseconds() == 0);
  constexpr int64_t kAhead = -3 * kSecond;
  const auto come = [&](const RoundTrip& trip) {
    clock.Add(trip);
    delay.Add(trip.answered, trip.came, clock);
  };
  come(Trip(10 * kSecond, kAhead, 1000, 0, 1000));
  EXPECT(delay.frames() == 1 && std::abs(delay.nanoseconds() - 1000) <= 2 * kRounding);
  // A queue in one direction only; these round trips do not change the offset.
  come(Trip(11 * kSecond, kAhead, 1000, 0, 40 * kMillisecond));
  come(Trip(12 * kSecond, kAhead, 40 * kMillisecond, 0, 1000));
  EXPECT(delay.frames() == 3);
  EXPECT(std::abs(delay.nanoseconds() - 40 * kMillisecond - 2000) <= 6 * kRounding);
}

// No value from a peer overflows a sum.
void HostileTimes() {
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  constexpr int64_t kBound = int64_t{1} << 61;
  constexpr int64_t kTimes[] = {kMin,    kMin + 1,   -kBound, -1,   0,       1,
                                kSecond, kBound - 1, kBound,  kMax, kMax - 1};
  ClockOffset clock;
  int measured = 0;
  for (const int64_t echoed : kTimes) {
    for (const int64_t received : kTimes) {
      for (const int64_t sent : kTimes) {
        Frame frame;
        frame.sent = sent;
        frame.echoed = echoed;
        frame.echo_received = received;
        const std::string bytes = Encode(frame);
        EXPECT(FrameReader().Feed(bytes.data(), bytes.size(), [&](const Frame& came) {
          ClockOffset fresh;
          for (ClockOffset* const one : {&clock, &fresh}) {
            one->Add({came.echoed, came.echo_received, came.sent, 100 * kSecond});
            EXPECT(one->uncertainty(1000 * kSecond) >= 0);
            OneWayDelay delay;
            delay.Add(came.sent, 100 * kSecond, *one);
            EXPECT(delay.nanoseconds() >= 0);
          }
          measured += fresh.measured();
        }));
      }
    }
  }
  EXPECT(measured > 0);
}

// On "two hosts" of this machine, which share a clock.
void BetweenRanks() {
  Plan plan;
  plan.hosts = 2;
  plan.silence_warning_seconds = 1;  // sends statuses five times as often
  OnEachRank(plan, [](Communicator& c) {
    Watch::Known other;
    do {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      const CommunicatorState state = c.State(0, 0);
      EXPECT(state.others.size() == 1);
      other = state.others[0];
    } while (!other.clock.measured());
    EXPECT(other.rank == 1 - c.rank() && !other.left && !other.lost);
    EXPECT(std::abs(other.clock.offset()) <= other.clock.uncertainty(Nanoseconds()) + kRounding);
    Do(c, Kind::kBarrier, 0);
  });
}

void All() {
  OneTrip();
  TheBestTripCounts();
  Nonsense();
  Drift();
  Delays();
  HostileTimes();
  BetweenRanks();
}

}  // namespace
}  // namespace tfdist::testing

int main() { return tfdist::testing::Report(tfdist::testing::All); }
