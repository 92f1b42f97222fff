// What a communicator knows of itself at one moment, as JSON for programs that read it later.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "control/json.h"
#include "control/recorder.h"
#include "control/watch.h"
#include "transport/fabric.h"
#include "transport/tcp_statistics.h"

namespace tfdist {

struct CommunicatorState {
  std::string name;
  const Topology* topology = nullptr;
  std::optional<std::string> aborted;  // why
  std::vector<std::string> waiting;    // behind what runs
  std::vector<Watch::Known> others;
  std::vector<TcpStatistics> links;    // to each rank
  Recorder::Log log;
};

// One object; docs/monitoring.md describes its members.
void Write(const CommunicatorState& state, JsonWriter* json);

}  // namespace tfdist
