// How the host waits for a GPU.
#pragma once

#include <functional>

#include "device/gpu.h"
#include "guard.h"

namespace tfdist {

// Waits until something on a GPU has passed, or for what ends the wait.
void AwaitPassed(const std::function<bool()>& has_passed, const std::function<bool()>& ends);

// Waits until a point in a stream has passed. The guard may end the wait by an Error, and so may
// `check`, if there is one, which is called now and then.
void Await(const DeviceEvent& event, Guard& guard, const std::function<void()>& check = {});

// Waits for what a stream was given, but not for long; whether that has passed. For ends after a
// failure, where nothing can be done about another one.
bool SettleSoon(cuda::Stream* stream, DeviceEvent& event) noexcept;

}  // namespace tfdist
