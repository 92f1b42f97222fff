// A link between two ranks of one host, through two rings in their segment.
#pragma once

#include "transport/host.h"
#include "transport/link.h"

namespace tfdist {

class RingLink : public Link {
 public:
  // Args: this rank's host, and the other rank's position on it.
  RingLink(Host& host, int other);

  size_t Write(const char* data, size_t bytes) override;
  size_t Read(char* data, size_t bytes) override;

 private:
  Host& host_;
  const int other_;
};

}  // namespace tfdist
