#include "device/device_coder.h"

#include "device/awaiting.h"
#include "error.h"

namespace tfdist {
namespace {

constexpr size_t kFloat = sizeof(float);

}  // namespace

DeviceCoder::DeviceCoder(const Gpu& gpu, const KernelModule& kernels, Guard& guard)
    : gpu_(gpu), guard_(guard), stream_(gpu), codec_(gpu, kernels, stream_), done_(gpu) {}

bool DeviceCoder::Takes(const Topology& topology, const Operation& operation) {
  if (operation.compression->within_hosts) return topology.size > 1;
  return topology.size > 1 && topology.hosts.size() == static_cast<size_t>(topology.size);
}

void DeviceCoder::MakeRoom(const Topology& topology, const Operation& operation) {
  Transfer whole;
  whole.part_bytes = CutEvenly(operation.in.bytes(), kFloat, topology.size, topology.size);
  whole.in = operation.in;
  whole.out = operation.out;
  const Members everyone = Everyone(topology);
  Allocate(CodedTransfer(whole, everyone, *operation.compression, 0));
}

void DeviceCoder::Run(Operation& operation, const OnHost& on_host) {
  if (cuda::Event* const ready = *operation.device) {
    gpu_.Use();
    cuda::Check(cuda::Load().cuStreamWaitEvent(stream_.get(), ready, 0), "cuStreamWaitEvent");
  }
  operation.compression->coder = this;
  try {
    on_host(operation);
    done_.Record(stream_.get());
    Await(done_, guard_);
  } catch (...) {
    // Its memory is the operation's until then. No kernel waits for anything.
    SettleSoon(stream_.get(), done_);
    throw;
  }
}

uint8_t* DeviceCoder::Begin(const CodedTransfer& transfer) {
  t_ = &transfer;
  fetched_.clear();
  Allocate(transfer);
  codec_.Begin(transfer);
  return encoded_;
}

void DeviceCoder::Allocate(const CodedTransfer& transfer) {
  const size_t bytes = transfer.EncodedBytes(), values = ChunksAtOnce() * transfer.chunk();
  try {
    encoded_ = static_cast<uint8_t*>(host_encoded_.Take(gpu_, bytes).data());
    on_device_ = device_encoded_.Take(gpu_, bytes).address();
    codec_.MakeRoom(values, TransferCodec::ListBytes(transfer));
  } catch (const Error& error) {
    throw NoRoomForCodes(gpu_, bytes + TransferCodec::RoomBytes(values), error);
  }
}

// All at once, before the first of them is sent.
void DeviceCoder::Foresee(int j, const Batch& batch) {
  codec_.Encode(j, batch.begin, batch.count, OnDevice(batch.encoded));
  Fetch(batch);
}

void DeviceCoder::Encode(int, const Batch& batch) { AwaitFetched(batch); }

void DeviceCoder::AddUp(const Batch& sums, const Arrived& arrived) {
  const int me = t_->me();
  const Codec& codec = t_->codec();
  const uint8_t* const first = arrived.encoded + EncodedBytes(codec, sums.begin);
  for (int j = 0; j < t_->members(); ++j) {
    if (j == me) continue;
    Return(first + static_cast<size_t>(j) * arrived.stride, EncodedBytes(codec, sums.count));
  }
  codec_.Sum(sums.begin, sums.count, OnDevice(arrived.encoded), arrived.stride,
             OnDevice(sums.encoded));
  Fetch(sums);
}

void DeviceCoder::Complete(const Batch& sums) { AwaitFetched(sums); }

void DeviceCoder::Decode(int j, const Batch& sums) {
  Return(sums.encoded, sums.bytes);
  codec_.Decode(j, sums.begin, sums.count, OnDevice(sums.encoded));
}

cuda::Address DeviceCoder::OnDevice(const uint8_t* encoded) const {
  return on_device_ + static_cast<size_t>(encoded - encoded_);
}

// To the host's memory.
void DeviceCoder::Fetch(const Batch& batch) {
  stream_.Copy(cuda::AddressOf(batch.encoded), OnDevice(batch.encoded), batch.bytes);
  const size_t number = fetched_.size();
  if (number == events_.size()) events_.push_back(std::make_unique<DeviceEvent>(gpu_));
  events_[number]->Record(stream_.get());
  fetched_[batch.encoded] = events_[number].get();
}

// To the GPU's.
void DeviceCoder::Return(const uint8_t* encoded, size_t bytes) const {
  stream_.Copy(OnDevice(encoded), cuda::AddressOf(encoded), bytes);
}

void DeviceCoder::AwaitFetched(const Batch& batch) {
  Await(*fetched_.at(batch.encoded), guard_);
}

}  // namespace tfdist
