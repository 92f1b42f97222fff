#include "device/device_rank.h"

#include <cstring>
#include <fstream>
#include <iterator>

#include "device/kernel_launch.h"
#include "error.h"

namespace tfdist {
namespace {

std::string Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

DeviceRank::DeviceRank(const DeviceSetup& setup, size_t index)
    : number(setup.gpus[index].number),
      gpu(std::make_shared<const Gpu>(number)),
      stream(*gpu),
      done(*gpu) {
  const std::string& file = setup.gpus[index].kernels;
  if (file.empty()) {
    lack = "there are no compiled kernels";
    return;
  }
  try {
    const std::string binary = Contents(file);
    AllocateBuffers(setup.buffer_bytes);
    kernels = std::make_shared<const KernelModule>(*gpu, binary.data(), KernelNames().data(),
                                                   KernelNames().size());
  } catch (const Error& error) { lack = ClauseOf(error); }
}

void DeviceRank::AllocateBuffers(size_t buffer_bytes) {
  const size_t bytes = KernelAllReduce::StagingBytes(buffer_bytes);
  try {
    staging.emplace(*gpu, bytes);
    words.emplace(*gpu, KernelAllReduce::kWordBytes);
  } catch (const Error& error) {
    throw NoRoom(*gpu, bytes, "kernels' buffers", "TFDIST_DEVICE_BUFFERS", error);
  }
}

PeerInfo DeviceRank::MakePeerInfo(const DeviceSetup& setup) {
  PeerInfo made{};
  made.gpu = gpu->uuid();
  std::strncpy(made.place, gpu->place().c_str(), sizeof(made.place) - 1);
  made.process = ThisProcess();
  made.number = number;
  made.buffer_bytes = setup.buffer_bytes;
  made.has_stream_waits = gpu->has_stream_waits();
  std::strncpy(made.transport, setup.transport.c_str(), sizeof(made.transport) - 1);
  std::strncpy(made.model, gpu->name().c_str(), sizeof(made.model) - 1);
  try {
    if (!kernels) throw Error(Code::kUnavailable, lack);
    made.staging = staging->Share();
    made.words = words->Share();
    made.staging_address = staging->address();
    made.words_address = words->address();
  } catch (const Error& error) {
    lack = ClauseOf(error);
    std::strncpy(made.lack, lack.c_str(), sizeof(made.lack) - 1);
  }
  return made;
}

}  // namespace tfdist
