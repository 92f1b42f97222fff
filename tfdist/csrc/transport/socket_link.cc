#include "transport/socket_link.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "error.h"

namespace tfdist {
namespace {

// So that what is received is still in the caches when it is read, and every link has its turn.
constexpr size_t kMostBytes = 256 << 10;

}  // namespace

SocketLink::SocketLink(std::unique_ptr<Stream> stream, std::string name)
    : stream_(std::move(stream)), name_(std::move(name)) {}

size_t SocketLink::Write(const char* data, size_t bytes) {
  const ssize_t sent = stream_->Write(data, std::min(bytes, kMostBytes));
  if (sent >= 0) {
    sent_bytes += static_cast<uint64_t>(sent);
    return static_cast<size_t>(sent);
  }
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return 0;
  throw Error(Code::kUnavailable,
              name_ + " cannot be reached any more: " + std::strerror(errno) + ".");
}

size_t SocketLink::Read(char* data, size_t bytes) {
  const ssize_t got = stream_->Read(data, std::min(bytes, kMostBytes));
  if (got > 0) {
    received_bytes += static_cast<uint64_t>(got);
    return static_cast<size_t>(got);
  }
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return 0;
  throw Error(Code::kUnavailable, name_ + (got == 0 ? " has closed the connection."
                                                    : std::string(" cannot be reached any more: ") +
                                                          std::strerror(errno) + "."));
}

}  // namespace tfdist
