// Makes streams of the connections of a group: in the clear, or in TLS once all have shaken hands.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tls/context.h"
#include "transport/stream.h"

namespace tfdist {

// For each rank a stream, or none.
using Streams = std::vector<std::unique_ptr<Stream>>;

struct Connections {
  Streams control;
  Streams data;
};

// Args: this rank, what messages call each rank, for each rank two descriptors or -1, which are
// taken over even where this fails, what TLS needs if it is wanted, and how long it may take to
// begin. Of two ranks the lower one is the server. Throws Error that names who is missing.
Connections Connect(int rank, const std::vector<std::string>& names,
                    const std::vector<int>& control, const std::vector<int>& data,
                    const TlsFiles& files, double seconds);

}  // namespace tfdist
