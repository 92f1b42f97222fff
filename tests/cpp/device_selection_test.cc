// Usage: device_selection_test [small]
//
// Selections on a GPU, residuals and sums of rows, bit-identical to the processor. With FAKE_CUDA,
// the kernels run on the processor.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cpp/device_calls.h"
#include "device/gpu.h"
#include "device/kernel_launch.h"
#include "error.h"
#include "sparse/select.h"

namespace tfdist::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinite = std::numeric_limits<float>::infinity();
constexpr float kThreshold = 0.75f;

using Floats = std::vector<float>;
enum class Kept { kNothing, kError, kMomentum };
enum class Kind { kNormal, kEqual, kZeros, kFew, kDenormal, kBroken, kMuch };
constexpr Kind kKinds[] = {Kind::kNormal,   Kind::kEqual,  Kind::kZeros, Kind::kFew,
                           Kind::kDenormal, Kind::kBroken, Kind::kMuch};

Floats Values(size_t count, Kind kind, std::mt19937& random) {
  std::normal_distribution<float> normal;
  Floats values(count);
  for (float& value : values) {
    value = normal(random);
    if (kind == Kind::kEqual) value = std::round(2 * value) / 2;
    if (kind == Kind::kZeros) value = random() % 2 ? 0.0f : -0.0f;
    if (kind == Kind::kFew && random() % 100 > 0) value = 0;
    if (kind == Kind::kDenormal) value *= 1e-40f;
    if (kind == Kind::kBroken && random() % 50 == 0) value = random() % 2 ? kNan : -kInfinite;
    if (kind == Kind::kMuch) value *= 1e38f;  // sums overflow
  }
  return values;
}

// The tensors of one side: the processor or the GPU.
struct Side {
  std::vector<Candidates> candidates;
  std::vector<Row> rows;
  std::vector<Floats> kept;  // errors and momenta
};

struct Case {
  std::vector<size_t> sizes;
  Kind kind = Kind::kNormal;
  Kept kept = Kept::kNothing;
  double density = 0.01;  // of the selected values; negative for none, 0 for a threshold
};

class Bench {
 public:
  Bench()
      : gpu_(0),
        kernels_(gpu_, KernelBinary().data(), KernelNames().data(), KernelNames().size()),
        stream_(gpu_) {}

  // Each step adds its gradients to the residuals of the steps before.
  void Compare(const Case& tried, int steps, unsigned seed) {
    std::mt19937 random(seed);
    memory_.Clear();
    Side host, device;
    for (size_t i = 0; i < tried.sizes.size(); ++i) {
      for (const bool momentum : {false, true}) {
        const bool wanted =
            tried.kept == Kept::kMomentum || (tried.kept == Kept::kError && !momentum);
        host.kept.push_back(wanted ? Values(tried.sizes[i], tried.kind, random) : Floats());
        device_kept_.resize(host.kept.size());
        device_kept_.back() = memory_.Put(Bytes(host.kept.back()));
      }
    }
    for (int step = 0; step < steps; ++step) {
      std::vector<Floats> in;
      std::vector<size_t> selected;
      host.candidates.clear();
      device.candidates.clear();
      for (const size_t size : tried.sizes) in.push_back(Values(size, tried.kind, random));
      for (size_t i = 0; i < in.size(); ++i) {
        selected.push_back(Selected(in[i].size(), tried.density));
        Candidates c{in[i].data(), nullptr, nullptr, in[i].size(), i % 3 ? 1.0f : 0.3f, 0.9f};
        if (tried.kept != Kept::kNothing) c.error = host.kept[2 * i].data();
        if (tried.kept == Kept::kMomentum) c.momentum = host.kept[2 * i + 1].data();
        host.candidates.push_back(c);
        c.in = cuda::PointerTo<float>(memory_.Put(Bytes(in[i])));
        if (c.error) c.error = cuda::PointerTo<float>(device_kept_[2 * i]);
        if (c.momentum) c.momentum = cuda::PointerTo<float>(device_kept_[2 * i + 1]);
        device.candidates.push_back(c);
      }
      OnHost(selected, tried.density == 0, host);
      OnDevice(selected, tried.density == 0, device);
      ExpectSame(device.rows, host.rows);
      for (size_t i = 0; i < host.kept.size(); ++i) {
        const Floats& expected = host.kept[i];
        ExpectSame(Get<float>(device_kept_[i], expected.size()), expected);
      }
    }
  }

  // Each rank selects a part of all values; one rank selects none.
  void CompareSums(const std::vector<size_t>& sizes, size_t ranks, unsigned seed) {
    std::mt19937 random(seed);
    const size_t values = std::accumulate(sizes.begin(), sizes.end(), size_t{0});
    std::vector<Row> rows;
    for (size_t rank = 0; rank < ranks; ++rank) {
      if (rank == 2) continue;
      const unsigned one_of = 1 + random() % 20;
      const Floats some = Values(values, rank % 2 ? Kind::kNormal : Kind::kBroken, random);
      for (size_t i = 0; i < values; ++i) {
        if (random() % one_of == 0) rows.push_back({static_cast<int32_t>(i), some[i]});
      }
    }
    std::vector<Floats> expected;
    std::vector<RowSums> tensors;
    for (const size_t size : sizes) expected.emplace_back(size, 42.0f);
    for (Floats& each : expected) tensors.push_back({each.data(), each.size()});
    SumRows(rows.data(), rows.size(), tensors);
    const std::vector<Floats> found = Sum(rows, sizes, ranks);
    for (size_t i = 0; i < sizes.size(); ++i) ExpectSame(found[i], expected[i]);
  }

  // Rows that no rank sends make all sums NaN.
  void CheckWrong(const std::vector<Row>& rows, size_t ranks) {
    for (const Floats& values : Sum(rows, {700, 0, 5}, ranks)) {
      for (const float value : values) EXPECT(std::isnan(value));
    }
  }

  void CheckThresholds() {
    KernelSelect select(gpu_, kernels_, stream_.get(), {});
    for (const float threshold : {0.0f, -1.0f, kNan}) {
      try {
        select.FindAbove(threshold, scratch_.Take(gpu_, select.ScratchBytes()).address());
        EXPECT(false);
      } catch (const Error& error) { EXPECT(error.code() == Code::kInvalidArgument); }
    }
  }

 private:
  static size_t Selected(size_t count, double density) {
    return density < 0 ? 0 : static_cast<size_t>(std::ceil(density * static_cast<double>(count)));
  }

  template <typename T>
  static std::vector<char> Bytes(const std::vector<T>& values) {
    const auto* const from = reinterpret_cast<const char*>(values.data());
    return {from, from + values.size() * sizeof(T)};
  }
  template <typename T>
  std::vector<T> Get(cuda::Address from, size_t count) {
    const std::vector<char> bytes = memory_.Get(from, count * sizeof(T));
    std::vector<T> values(count);
    if (count > 0) std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }

  static void OnHost(const std::vector<size_t>& selected, bool above, Side& side) {
    side.rows.clear();
    int32_t first = 0;
    for (size_t i = 0; i < selected.size(); ++i) {
      const Candidates& c = side.candidates[i];
      const auto indices = above ? SelectAbove(c, kThreshold) : SelectLargest(c, selected[i]);
      side.rows.resize(side.rows.size() + indices.size());
      TakeRows(c, indices, first, side.rows.data() + side.rows.size() - indices.size());
      first += static_cast<int32_t>(c.count);
    }
  }

  void OnDevice(const std::vector<size_t>& selected, bool above, Side& side) {
    KernelSelect select(gpu_, kernels_, stream_.get(), side.candidates);
    const cuda::Address scratch = scratch_.Take(gpu_, select.ScratchBytes()).address();
    if (above) {
      select.FindAbove(kThreshold, scratch);
    } else {
      select.FindLargest(selected, scratch);
    }
    stream_.Synchronize();
    const uint32_t rows = Get<uint32_t>(select.rows(), 1)[0];
    const cuda::Address to = memory_.Take(rows * sizeof(Row));
    select.Take(cuda::PointerTo<Row>(to));
    stream_.Synchronize();
    side.rows = Get<Row>(to, rows);
  }

  std::vector<Floats> Sum(const std::vector<Row>& rows, const std::vector<size_t>& sizes,
                          size_t ranks) {
    memory_.Clear();
    std::vector<RowSums> tensors;
    for (const size_t size : sizes) {
      const Floats before(size, 42.0f);
      tensors.push_back({cuda::PointerTo<float>(memory_.Put(Bytes(before))), size});
    }
    const cuda::Address from = memory_.Put(Bytes(rows));
    const KernelScatter scatter(gpu_, kernels_, stream_.get(), ranks);
    scatter.Sum(cuda::PointerTo<Row>(from), rows.size(), tensors,
                scratch_.Take(gpu_, scatter.ScratchBytes()).address());
    stream_.Synchronize();
    std::vector<Floats> found;
    for (const RowSums& tensor : tensors) {
      found.push_back(Get<float>(cuda::AddressOf(tensor.values), tensor.count));
    }
    return found;
  }

  static void ExpectSame(float found, float expected) {
    EXPECT(AreEqual(DType::kFloat32, reinterpret_cast<const char*>(&found),
                    reinterpret_cast<const char*>(&expected)));
  }
  static void ExpectSame(const Row& found, const Row& expected) {
    EXPECT(found.index == expected.index);
    ExpectSame(found.value, expected.value);
  }
  template <typename T>
  static void ExpectSame(const std::vector<T>& found, const std::vector<T>& expected) {
    EXPECT(found.size() == expected.size());
    for (size_t i = 0; i < found.size(); ++i) ExpectSame(found[i], expected[i]);
  }

  const Gpu gpu_;
  const KernelModule kernels_;
  const DeviceStream stream_;
  Memory memory_;
  Growing<DeviceMemory> scratch_;
  std::vector<cuda::Address> device_kept_;
};

std::string NameOf(const Case& tried) {
  return "kind " + std::to_string(static_cast<int>(tried.kind)) + ", kept " +
         std::to_string(static_cast<int>(tried.kept)) + ", density " +
         std::to_string(tried.density) + ", " + std::to_string(tried.sizes.size()) +
         " tensors, the first of " + std::to_string(tried.sizes[0]) + ": ";
}

void Everything(bool small) {
  cuda::Load(FakeDriver());
  Bench bench;
  unsigned seed = 0;
  const auto compare = [&](const Case& tried) {
    try {
      bench.Compare(tried, 2, ++seed);
    } catch (const Failure& failure) { throw Failure(NameOf(tried) + failure.what()); }
  };
  std::vector<size_t> many;  // more than a kernel's list holds
  for (size_t i = 0; i < 70; ++i) many.push_back(i * 37 % 101);
  const std::vector<size_t> some{0, 1, 2, 3, 511, 0, 513, 5000, 0};
  const std::vector<std::vector<size_t>> all{{0}, {1}, {2}, {3}, {30'001}, many, some};
  for (const Kept kept : {Kept::kNothing, Kept::kError, Kept::kMomentum}) {
    for (const double density : {0.0, 0.01, 0.4, 1.0}) {
      for (const Kind kind : kKinds) compare({some, kind, kept, density});
    }
    for (const std::vector<size_t>& sizes : all) compare({sizes, Kind::kEqual, kept, 0.2});
  }
  // Selects nothing.
  bench.Compare({{3000, 5}, Kind::kNormal, Kept::kMomentum, -1}, 2, ++seed);
  bench.CheckThresholds();
  for (const size_t ranks : {size_t{1}, size_t{2}, size_t{5}}) {
    for (const std::vector<size_t>& sizes : all) bench.CompareSums(sizes, ranks, ++seed);
  }
  bench.CheckWrong({{0, 1}, {705, 1}}, 1);
  bench.CheckWrong({{-1, 1}}, 2);
  bench.CheckWrong({{3, 1}, {3, 1}, {3, 1}}, 2);
  if (small) return;
  compare({{1'000'003}, Kind::kNormal, Kept::kMomentum, 0.01});
  compare({{1'000'003}, Kind::kEqual, Kept::kError, 0.3});
  bench.CompareSums({1'000'003}, 3, ++seed);
}

}  // namespace
}  // namespace tfdist::testing

int main(int argc, char** argv) {
  using namespace tfdist::testing;
  return Report([&] { Everything(argc > 1 && std::string(argv[1]) == "small"); });
}
