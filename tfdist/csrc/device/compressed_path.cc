#include "device/compressed_path.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "device/stream_waits.h"
#include "error.h"

namespace tfdist {
namespace {

using device::Stretch;

constexpr size_t kFloat = sizeof(float);

// Describes the tensors of a buffer list as stretches of a run. In a run, the values of all tensors
// form one sequence.
template <typename Bytes>
std::vector<Stretch> Stretches(const Bytes& buffers) {
  std::vector<Stretch> stretches;
  uint64_t begin = 0;
  buffers.ForEach(0, buffers.bytes(), [&](const char* data, size_t bytes) {
    stretches.push_back({reinterpret_cast<float*>(const_cast<char*>(data)), begin});
    begin += bytes / kFloat;
  });
  return stretches;
}

// Returns a position in `run`: the position of the value with index `begin` in a part.
// Args: run_begin: the offset of the part in the run, in bytes.
device::Place At(const device::Run& run, size_t run_begin, size_t begin) {
  return {run, run_begin / kFloat + begin};
}

}  // namespace

size_t TransferCodec::ListBytes(const CodedTransfer& transfer) {
  return (Stretches(transfer.in()).size() + Stretches(transfer.out()).size() +
          Stretches(transfer.error()).size()) *
         sizeof(Stretch);
}

void TransferCodec::MakeRoom(size_t values, size_t list_bytes) {
  room_ = rooms_.Take(gpu_, RoomBytes(values)).address();
  host_list_ = static_cast<char*>(host_lists_.Take(gpu_, list_bytes).data());
  device_list_ = device_lists_.Take(gpu_, list_bytes).address();
  max_list_bytes_ = list_bytes;
  listed_ = 0;
}

void TransferCodec::Begin(const CodedTransfer& transfer) {
  t_ = &transfer;
  const std::vector<Stretch> lists[] = {Stretches(t_->in()), Stretches(t_->out()),
                                        Stretches(t_->error())};
  device::Run* const runs[] = {&in_, &out_, &error_};
  const size_t first = listed_;
  for (size_t i = 0; i < 3; ++i) {
    *runs[i] = {cuda::PointerTo<const Stretch>(device_list_ + listed_),
                static_cast<uint32_t>(lists[i].size())};
    const size_t bytes = lists[i].size() * sizeof(Stretch);
    if (bytes > 0) std::memcpy(host_list_ + listed_, lists[i].data(), bytes);
    listed_ += bytes;
  }
  stream_.Copy(device_list_ + first, cuda::AddressOf(host_list_ + first), listed_ - first);
}

void TransferCodec::Encode(int j, size_t begin, size_t count, cuda::Address to) const {
  codec_.Encode(BatchOf(t_->codec(), j, begin, count, CodedTransfer::Stage::kValues),
                At(in_, t_->InBegin(j), begin), At(error_, t_->ErrorBegin(j), begin), room_, to);
}

void TransferCodec::Sum(size_t begin, size_t count, cuda::Address first, size_t stride,
                        cuda::Address to) const {
  const int me = t_->me();
  codec_.Sum(BatchOf(t_->sums_codec(), me, begin, count, CodedTransfer::Stage::kSums),
             {t_->codec(), cuda::PointerTo<const uint8_t>(first + EncodedBytes(t_->codec(), begin)),
              stride, static_cast<uint32_t>(t_->members()), static_cast<uint32_t>(me)},
             t_->votes(), At(in_, t_->InBegin(me), begin), At(error_, t_->ErrorBegin(me), begin),
             At(out_, t_->OutBegin(me), begin), room_, to);
}

void TransferCodec::Decode(int j, size_t begin, size_t count, cuda::Address from) const {
  codec_.Decode(t_->sums_codec(), count, from, At(out_, t_->OutBegin(j), begin), room_);
}

device::Batch TransferCodec::BatchOf(const Codec& codec, int j, size_t begin, size_t count,
                                     CodedTransfer::Stage stage) const {
  const size_t chunk = t_->chunk();
  return {codec, count, chunk, t_->Seed(stage, t_->Position(j) + begin),
          static_cast<uint32_t>(chunk) * CodedTransfer::kSeedStep};
}

Error NoRoomForCodes(const Gpu& gpu, size_t bytes, const Error& error) {
  return NoRoom(gpu, bytes, "encoded values", "`bytes_per_pack`", error);
}

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
    // The stream may still use the memory of the operation, so wait until the stream has finished.
    // This wait is short, because the kernels in this stream do not wait for other GPUs.
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
  const size_t bytes = transfer.BufferBytes(), values = ChunksAtOnce() * transfer.chunk();
  try {
    encoded_ = static_cast<uint8_t*>(host_encoded_.Take(gpu_, bytes).data());
    on_device_ = device_encoded_.Take(gpu_, bytes).address();
    codec_.MakeRoom(values, TransferCodec::ListBytes(transfer));
  } catch (const Error& error) {
    throw NoRoomForCodes(gpu_, bytes + TransferCodec::RoomBytes(values), error);
  }
}

// Queues the encoding of the batch immediately, so that the GPU can encode all batches before the
// first one is sent. `EncodeBatch` then only waits until the batch has been encoded.
void DeviceCoder::Foresee(int j, const Batch& batch) {
  codec_.Encode(j, batch.begin, batch.count, OnDevice(batch.encoded));
  Fetch(batch);
}

void DeviceCoder::EncodeBatch(int, const Batch& batch) { AwaitFetched(batch); }

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

void DeviceCoder::DecodeBatch(int j, const Batch& sums) {
  Return(sums.encoded, sums.bytes);
  codec_.Decode(j, sums.begin, sums.count, OnDevice(sums.encoded));
}

cuda::Address DeviceCoder::OnDevice(const uint8_t* encoded) const {
  return on_device_ + static_cast<size_t>(encoded - encoded_);
}

// Queues a copy of encoded values from the GPU to host memory.
void DeviceCoder::Fetch(const Batch& batch) {
  stream_.Copy(cuda::AddressOf(batch.encoded), OnDevice(batch.encoded), batch.bytes);
  const size_t number = fetched_.size();
  if (number == events_.size()) events_.push_back(std::make_unique<DeviceEvent>(gpu_));
  events_[number]->Record(stream_.get());
  fetched_[batch.encoded] = events_[number].get();
}

// Queues a copy of encoded values from host memory to the GPU.
void DeviceCoder::Return(const uint8_t* encoded, size_t bytes) const {
  stream_.Copy(OnDevice(encoded), cuda::AddressOf(encoded), bytes);
}

void DeviceCoder::AwaitFetched(const Batch& batch) { Await(*fetched_.at(batch.encoded), guard_); }

bool CompressedPath::GoesByNccl(Fabric& fabric, const Operation& operation, const Parts& parts,
                                const std::function<void()>& settle) {
  routes_.Open(fabric, operation);
  if (routes_.ChooseForCompressed() != Routes::Transport::kNccl) return false;
  if (!by_nccl_) by_nccl_ = std::make_unique<NcclCoded>(routes_.topology(), ranks_);
  if (!by_nccl_->Takes(parts)) return false;
  if (by_nccl_->IsFull(parts)) settle();
  std::string lack;
  if (by_nccl_->MakeRoom(fabric, operation, parts, &lack)) return true;
  if (!lack.empty()) Announce(lack);
  return false;
}

bool CompressedPath::RunOverLinks(const Topology& topology, Operation& operation,
                                  const DeviceCoder::OnHost& on_host) {
  const bool may = ranks_.size() == 1 && ranks_[0]->kernels && setup_.transport != "host";
  if (!may || !DeviceCoder::Takes(topology, operation)) return false;
  try {
    if (!over_links_) {
      over_links_ = std::make_unique<DeviceCoder>(*ranks_[0]->gpu, *ranks_[0]->kernels, guard_);
    }
    over_links_->MakeRoom(topology, operation);
  } catch (const Error& error) {
    Announce(error.what());
    return false;
  }
  over_links_->Run(operation, on_host);
  return true;
}

// Warns that compressed gradients pass through host memory, and explains why. Each object warns at
// most once.
void CompressedPath::Announce(const std::string& lack) {
  if (!setup_.warn || std::exchange(announced_, true)) return;
  setup_.warn("Compressed gradients go through the host's memory, since " + lack);
}

}  // namespace tfdist
