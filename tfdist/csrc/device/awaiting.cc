#include "device/awaiting.h"

#include <chrono>
#include <thread>

#include "error.h"

namespace tfdist {
namespace {

constexpr int kSpins = 200;  // some µs each
constexpr int kLooksForOneCheck = 20;
constexpr auto kPause = std::chrono::microseconds(50);
constexpr auto kSoon = std::chrono::seconds(5);

}  // namespace

void AwaitPassed(const std::function<bool()>& has_passed, const std::function<bool()>& ends) {
  for (int looks = 1; !has_passed() && !ends(); ++looks) {
    if (looks < kSpins) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kPause);
    }
  }
}

void Await(const DeviceEvent& event, Guard& guard, const std::function<void()>& check) {
  int looks = 0;
  AwaitPassed([&] { return event.HasPassed(); },
              [&] {
                guard.Check();
                if (check && ++looks % kLooksForOneCheck == 0) check();
                return false;
              });
}

bool SettleSoon(cuda::Stream* stream, DeviceEvent& event) noexcept {
  const auto end = std::chrono::steady_clock::now() + kSoon;
  try {
    event.Record(stream);
    while (!event.HasPassed()) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  } catch (const Error&) {
    return false;  // A GPU that does not work any more runs nothing either.
  }
}

}  // namespace tfdist
