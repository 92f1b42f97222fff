#include "product.h"

#include <cstdlib>
#include <fstream>
#include <future>
#include <iterator>

#include "timing.h"

namespace tfdist::benchmark {
namespace {

// Many more blocks than run at once, so that they come out even; 10 ms at an H100's peak.
constexpr unsigned kBlocks = 32768, kThreads = 256;
constexpr int kMultiplications = 5000;
constexpr const char* kName = "benchmark_product";

std::string Contents() {
  const char* const path = std::getenv("PRODUCT_KERNEL");
  std::ifstream file(path ? path : "", std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

Product::Product(const Gpu& gpu)
    : gpu_(gpu),
      binary_(Contents()),
      kernel_(gpu, binary_.data(), &kName, 1),
      out_(gpu, sizeof(float)),
      done_(gpu) {
  gpu.Use();
  const auto create = cuda::Load().cuStreamCreateWithPriority;
  cuda::Check(create(&stream_, cuda::kNonBlocking, 0), "cuStreamCreateWithPriority");
}

Product::~Product() {
  gpu_.UseIfPossible();
  cuda::Load().cuStreamDestroy_v2(stream_);
}

double Product::Time(const std::function<void()>& meanwhile) {
  const double start = Now();
  kernel_.Launch(kName, kBlocks, kThreads, stream_, out_.address(), kMultiplications, 0.999f, 1.0f);
  done_.Record(stream_);
  auto end = std::async(std::launch::async, [this] {
    AwaitExactly(done_);
    return Now();
  });
  meanwhile();
  return end.get() - start;
}

}  // namespace tfdist::benchmark
