#include "transport/socket_link.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "error.h"

namespace tfdist {
namespace {

// So that what is received is still in the caches when it is read, and every link has its turn.
constexpr size_t kMostBytes = 256 << 10;

}  // namespace

SocketLink::SocketLink(int descriptor, std::string name)
    : descriptor_(descriptor), name_(std::move(name)) {
  fcntl(descriptor_, F_SETFL, fcntl(descriptor_, F_GETFL) | O_NONBLOCK);
  const int yes = 1;
  // Fails on a socket that is not TCP, where it is not needed.
  setsockopt(descriptor_, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
}

SocketLink::~SocketLink() { close(descriptor_); }

size_t SocketLink::Write(const char* data, size_t bytes) {
  const ssize_t sent = send(descriptor_, data, std::min(bytes, kMostBytes), MSG_NOSIGNAL);
  if (sent >= 0) {
    sent_bytes += static_cast<uint64_t>(sent);
    return static_cast<size_t>(sent);
  }
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return 0;
  throw Error(Code::kUnavailable,
              name_ + " cannot be reached any more: " + std::strerror(errno) + ".");
}

size_t SocketLink::Read(char* data, size_t bytes) {
  const ssize_t got = recv(descriptor_, data, std::min(bytes, kMostBytes), 0);
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
