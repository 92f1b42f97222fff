#include "transport/socket.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

namespace tfdist {

Socket::Socket(int descriptor) : descriptor_(descriptor) {
  fcntl(descriptor_, F_SETFL, fcntl(descriptor_, F_GETFL) | O_NONBLOCK);
  const int yes = 1;
  // Fails on a socket that is not TCP, where it is not needed.
  setsockopt(descriptor_, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
}

Socket::~Socket() { close(descriptor_); }

ssize_t Socket::Read(char* data, size_t bytes) { return recv(descriptor_, data, bytes, 0); }

ssize_t Socket::Write(const char* data, size_t bytes) {
  return send(descriptor_, data, bytes, MSG_NOSIGNAL);
}

}  // namespace tfdist
