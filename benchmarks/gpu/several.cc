// Measures several GPUs of this host, with one process for each GPU. Prints one line of JSON for
// each figure.
//
//     several RANKS ROUNDS BYTES...
//
// The environment variables GPU_KERNELS and PRODUCT_KERNEL are the paths of the compiled kernels.
// TFDIST_CUDA_LIBRARY is the path of the driver. NCCL_LIBRARY is the path of NCCL, if NCCL is
// available.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cpp/ranks.h"
#include "rank.h"

namespace tfdist::benchmark {
namespace {

// The timeout of a collective. It is long, because NCCL's first collective takes a long time.
constexpr double kSeconds = 120;

using Wirings = std::map<std::string, std::unique_ptr<testing::Wiring>>;

std::string Environment(const char* name) {
  const char* const value = std::getenv(name);
  return value ? value : "";
}

Task Parse(int argc, char** argv) {
  if (argc < 4) throw std::runtime_error("several RANKS ROUNDS BYTES...");
  Task task{std::atoi(argv[1]), std::atoi(argv[2]), {}};
  for (int i = 3; i < argc; ++i) task.sizes.push_back(std::strtoull(argv[i], nullptr, 10));
  return task;
}

// Connects the ranks: once for each way in `kWays`, and once for tensors in the host's memory.
Wirings Wire(const Task& task) {
  Wirings wirings;
  testing::Plan plan;
  plan.ranks = task.ranks;
  plan.as = testing::As::kProcesses;
  plan.timeout_seconds = kSeconds;
  wirings[""] = std::make_unique<testing::Wiring>(plan);
  for (const char* const way : kWays) wirings[way] = std::make_unique<testing::Wiring>(plan);
  return wirings;
}

DevicePath::Setup SetupOf(const std::string& way, int gpu) {
  DevicePath::Setup setup;
  setup.gpus = {{gpu, Environment("GPU_KERNELS")}};
  setup.cuda = Environment("TFDIST_CUDA_LIBRARY");
  if (way == "nccl") setup.nccl = Environment("NCCL_LIBRARY");
  setup.transport = way;
  return setup;
}

void Measure(const Task& task, int number, const Wirings& wirings) {
  Rank::Communicators communicators;
  for (const auto& [way, wiring] : wirings) {
    Communicator::Setup setup = wiring->Take(number);
    if (!way.empty()) setup.device = SetupOf(way, number);
    communicators[way] = std::make_unique<Communicator>(std::move(setup));
  }
  Rank rank(task, number, std::move(communicators));
  MeasureCopies(rank);
  MeasureAllReduces(rank);
  MeasureNccl(rank);
  MeasureProducts(rank);
}

// Runs all ranks. Returns whether all of them have ended without an error.
bool Run(const Task& task) {
  Wirings wirings = Wire(task);
  std::vector<pid_t> children;
  for (int number = 0; number < task.ranks; ++number) {
    children.push_back(fork());
    if (children.back() < 0) throw std::runtime_error("There can be no more processes.");
    if (children.back() > 0) continue;
    int code = 0;
    try {
      Measure(task, number, wirings);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", number, error.what());
      code = 1;
    }
    std::fflush(nullptr);
    _exit(code);
  }
  // Closes the sockets in this process, so that the other ranks notice if a rank ends.
  wirings.clear();
  bool good = true;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    good = good && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  return good;
}

}  // namespace
}  // namespace tfdist::benchmark

int main(int argc, char** argv) {
  using namespace tfdist::benchmark;
  std::setvbuf(stdout, nullptr, _IOLBF, 1 << 16);
  try {
    return Run(Parse(argc, argv)) ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
