// What ranks tell each other beside the data: that they live, where they are, why they give up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "error.h"
#include "fingerprint.h"

namespace tfdist {

enum class FrameKind : uint8_t { kStatus = 1, kAbort = 2, kFarewell = 3, kFailure = 4, kWaited = 5 };

// Where a rank is.
struct Status {
  uint64_t sequence = 0;    // of the last collective of the group that it has joined
  bool active = false;      // whether it is in a collective or a message right now
  int32_t peer = -1;        // of a message
  uint32_t progress = 0;    // a number that changes whenever the rank makes progress
  Fingerprint fingerprint;  // of what it is in
};

struct Frame {
  FrameKind kind = FrameKind::kStatus;
  Status status;             // of a status or a farewell
  int64_t sent = 0;          // when, by the sender's clock; of a status
  int64_t echoed = 0;        // the time in the last status from whom this one goes to; 0 for none
  int64_t echo_received = 0;  // when that came
  Code code = Code::kUnavailable;  // of an abort
  uint8_t failures = 0;      // of a failure: steps that have failed, this one counted
  std::string message;       // of an abort, a failure, or what the receiver is waited for in
};

std::string Encode(const Frame& frame);

// Puts frames together from bytes as they come. Trusts nothing: a length is bounded before it is
// believed, and whatever is not a frame ends the stream.
class FrameReader {
 public:
  // Calls `use` for every frame that is complete. Returns false, for good, on anything else.
  bool Feed(const char* data, size_t bytes, const std::function<void(const Frame&)>& use);

 private:
  std::string buffer_;
  bool broken_ = false;
};

}  // namespace tfdist
