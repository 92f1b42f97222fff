// A link to a rank of another host, over a stream.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "transport/link.h"
#include "transport/stream.h"

namespace tfdist {

class SocketLink : public Link {
 public:
  // `name` is what messages call the other rank.
  SocketLink(std::unique_ptr<Stream> stream, std::string name);

  size_t Write(const char* data, size_t bytes) override;
  size_t Read(char* data, size_t bytes) override;
  int descriptor() const override { return stream_->descriptor(); }

  std::atomic<uint64_t> sent_bytes{0};
  std::atomic<uint64_t> received_bytes{0};

 private:
  const std::unique_ptr<Stream> stream_;
  const std::string name_;
};

}  // namespace tfdist
