// What goes wrong in a collective.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace tfdist {

enum class Code : int {
  kInvalidArgument = 1,  // the caller's mistake, found before anything was sent
  kMismatch = 2,         // the ranks did not call the same collective
  kUnavailable = 3,      // a rank was lost, or the communicator was aborted
  kClosed = 4,           // the communicator has been closed here
  kInternal = 5,
  kCancelled = 6,        // the caller has asked for the end; never told to other ranks
};

// The longest message that ranks pass on to one another; the same for all ways, so that all raise
// the same.
constexpr size_t kLongestMessage = 1015;

class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& message) : std::runtime_error(message), code_(code) {}
  Code code() const { return code_; }

 private:
  Code code_;
};

// What an error says, for the middle of a sentence.
inline std::string ClauseOf(const Error& error) {
  std::string text = error.what();
  if (!text.empty() && text.back() == '.') text.pop_back();
  return text.empty() ? "the reason is unknown" : text;
}

}  // namespace tfdist
