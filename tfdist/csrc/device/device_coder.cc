#include "device/device_coder.h"

#include <cstring>
#include <string>

#include "device/awaiting.h"
#include "error.h"

namespace tfdist {
namespace {

using device::Stretch;

constexpr size_t kFloat = sizeof(float);

// The tensors of a run of bytes.
template <typename Bytes>
std::vector<Stretch> Stretches(const Bytes& pieces) {
  std::vector<Stretch> stretches;
  uint64_t begin = 0;
  pieces.ForEach(0, pieces.bytes(), [&](const char* data, size_t bytes) {
    stretches.push_back({reinterpret_cast<float*>(const_cast<char*>(data)), begin});
    begin += bytes / kFloat;
  });
  return stretches;
}

}  // namespace

DeviceCoder::DeviceCoder(const Gpu& gpu, const KernelModule& kernels, Guard& guard)
    : gpu_(gpu), guard_(guard), stream_(gpu), codec_(kernels, stream_.get()), done_(gpu) {}

bool DeviceCoder::Takes(const Topology& topology, const Operation& operation) {
  if (operation.compression->within_hosts) return topology.size > 1;
  return topology.size > 1 && topology.hosts.size() == static_cast<size_t>(topology.size);
}

void DeviceCoder::MakeRoom(const Topology& topology, const Operation& operation) {
  CheckCodec(operation.compression->codec);
  Transfer whole;
  whole.part_bytes = CutEvenly(operation.in.bytes(), kFloat, topology.size, topology.size);
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
  ListTensors();
  return encoded_;
}

void DeviceCoder::Allocate(const CodedTransfer& transfer) {
  const size_t bytes = transfer.EncodedBytes();
  const size_t room = KernelCodec::RoomBytes(ChunksAtOnce() * transfer.chunk());
  try {
    encoded_ = static_cast<uint8_t*>(host_encoded_.Take(gpu_, bytes).data());
    on_device_ = device_encoded_.Take(gpu_, bytes).address();
    room_ = device_room_.Take(gpu_, room).address();
  } catch (const Error& error) {
    throw Error(error.code(), std::to_string(bytes + room) +
                                  " bytes for encoded values cannot be had on " + gpu_.name() +
                                  "; lower `bytes_per_pack`, or set "
                                  "TF_FORCE_GPU_ALLOW_GROWTH=true: " + error.what());
  }
}

// Tells the kernels where the values lie.
void DeviceCoder::ListTensors() {
  const std::vector<Stretch> lists[] = {Stretches(t_->in()), Stretches(t_->out()),
                                        Stretches(t_->error())};
  device::Run* const runs[] = {&in_, &out_, &error_};
  size_t count = 0;
  for (const std::vector<Stretch>& list : lists) count += list.size();
  auto* to = static_cast<Stretch*>(host_lists_.Take(gpu_, count * sizeof(Stretch)).data());
  const cuda::Address from = cuda::AddressOf(to);
  const cuda::Address listed = device_lists_.Take(gpu_, count * sizeof(Stretch)).address();
  auto* next = cuda::PointerTo<const Stretch>(listed);
  for (size_t i = 0; i < 3; ++i) {
    *runs[i] = {next, static_cast<uint32_t>(lists[i].size())};
    if (!lists[i].empty()) std::memcpy(to, lists[i].data(), lists[i].size() * sizeof(Stretch));
    to += lists[i].size();
    next += lists[i].size();
  }
  stream_.Copy(listed, from, count * sizeof(Stretch));
}

// All at once, before the first of them is sent.
void DeviceCoder::Foresee(int j, const Batch& batch) {
  codec_.Encode(BatchOf(t_->codec(), j, batch, CodedTransfer::Stage::kValues),
                At(in_, t_->InBegin(j), batch), At(error_, t_->ErrorBegin(j), batch), room_,
                OnDevice(batch.encoded));
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
  const auto* const on_device = cuda::PointerTo<const uint8_t>(OnDevice(first));
  codec_.Sum(BatchOf(t_->sums_codec(), me, sums, CodedTransfer::Stage::kSums),
             {codec, on_device, arrived.stride, static_cast<uint32_t>(t_->members()),
              static_cast<uint32_t>(me)},
             t_->votes(), At(in_, t_->InBegin(me), sums), At(error_, t_->ErrorBegin(me), sums),
             At(out_, t_->OutBegin(me), sums), room_, OnDevice(sums.encoded));
  Fetch(sums);
}

void DeviceCoder::Complete(const Batch& sums) { AwaitFetched(sums); }

void DeviceCoder::Decode(int j, const Batch& sums) {
  Return(sums.encoded, sums.bytes);
  codec_.Decode(t_->sums_codec(), sums.count, OnDevice(sums.encoded),
                At(out_, t_->OutBegin(j), sums), room_);
}

device::Batch DeviceCoder::BatchOf(const Codec& codec, int j, const Batch& batch,
                                   CodedTransfer::Stage stage) const {
  const size_t chunk = t_->chunk();
  return {codec, batch.count, chunk, t_->Seed(stage, t_->Position(j) + batch.begin),
          static_cast<uint32_t>(chunk) * CodedTransfer::kSeedStep};
}

// Args: begin: bytes of the run that come before the part.
device::Place DeviceCoder::At(const device::Run& run, size_t begin,
                              const Batch& batch) const {
  return {run, begin / kFloat + batch.begin};
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
