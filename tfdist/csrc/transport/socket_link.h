// A link to a rank of another host, over a connected stream socket.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "transport/link.h"

namespace tfdist {

class SocketLink : public Link {
 public:
  // Takes over the descriptor; `name` is what messages call the other rank.
  SocketLink(int descriptor, std::string name);
  ~SocketLink() override;
  SocketLink(const SocketLink&) = delete;
  SocketLink& operator=(const SocketLink&) = delete;

  size_t Write(const char* data, size_t bytes) override;
  size_t Read(char* data, size_t bytes) override;
  int descriptor() const override { return descriptor_; }

  std::atomic<uint64_t> sent_bytes{0};
  std::atomic<uint64_t> received_bytes{0};

 private:
  const int descriptor_;
  const std::string name_;
};

}  // namespace tfdist
