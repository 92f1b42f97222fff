#include "device/transfer_codec.h"

#include <cstring>
#include <string>
#include <vector>

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

// Args: run_begin: bytes of the run that come before the part.
device::Place At(const device::Run& run, size_t run_begin, size_t begin) {
  return {run, run_begin / kFloat + begin};
}

}  // namespace

size_t TransferCodec::ListBytes(const CodedTransfer& transfer) {
  return (Stretches(transfer.in()).size() + Stretches(transfer.out()).size() +
          Stretches(transfer.error()).size()) * sizeof(Stretch);
}

void TransferCodec::MakeRoom(size_t values, size_t list_bytes) {
  room_ = rooms_.Take(gpu_, RoomBytes(values)).address();
  host_list_ = static_cast<char*>(host_lists_.Take(gpu_, list_bytes).data());
  device_list_ = device_lists_.Take(gpu_, list_bytes).address();
  most_listed_ = list_bytes;
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

}  // namespace tfdist
