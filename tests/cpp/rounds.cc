#include "cpp/rounds.h"

#include <dirent.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "cpp/ranks.h"

namespace tfdist::testing {
namespace {

// The resources that this process holds.
struct Holding {
  int descriptors;
  int threads;
  int segments;
  size_t resident_bytes;
};

int Entries(const char* path) {
  int count = 0;
  DIR* folder = opendir(path);
  while (readdir(folder)) ++count;
  closedir(folder);
  return count;
}

Holding Look() {
  Holding holding{Entries("/proc/self/fd"), Entries("/proc/self/task"), 0, 0};
  char line[4096];
  FILE* maps = std::fopen("/proc/self/maps", "r");
  while (std::fgets(line, sizeof(line), maps)) {
    holding.segments += std::strstr(line, "tfdist-test") != nullptr;
  }
  std::fclose(maps);
  size_t pages = 0, resident = 0;
  FILE* statm = std::fopen("/proc/self/statm", "r");
  EXPECT(std::fscanf(statm, "%zu %zu", &pages, &resident) == 2);
  std::fclose(statm);
  holding.resident_bytes = resident * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return holding;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kWatchesMemory = false;  // the sanitizer keeps freed memory, and finds leaks itself
#else
constexpr bool kWatchesMemory = true;
#endif

}  // namespace

void Repeat(int rounds, const std::function<void(int round)>& round, int closed) {
  constexpr size_t kGrowth = size_t{1} << 20;
  for (int number = 0; number < kFirstRounds; ++number) round(number);
  const Holding before = Look();
  for (int number = 0; number < rounds; ++number) round(number);
  const Holding after = Look();
  EXPECT(after.descriptors == before.descriptors - rounds * closed);
  EXPECT(after.threads == before.threads);
  EXPECT(after.segments == before.segments);
  EXPECT(!kWatchesMemory || after.resident_bytes < before.resident_bytes + kGrowth);
}

}  // namespace tfdist::testing
