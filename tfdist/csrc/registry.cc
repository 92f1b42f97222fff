#include "registry.h"

#include <pthread.h>

#include <map>
#include <mutex>
#include <string>

namespace tfdist {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<Communicator>> communicators;
  int64_t last = 0;
};

// Returns the only registry of this process. It is never destroyed, because threads of other
// libraries may still use it while the process exits.
Registry& Instance() {
  static Registry* const registry = new Registry;
  return *registry;
}

// Empties the registry in a forked child without destroying the communicators. They must not be
// destroyed in the child, because the child does not have their threads.
void InForkedChild() {
  new std::map<int64_t, std::shared_ptr<Communicator>>(std::move(Instance().communicators));
  Instance().communicators.clear();
  Instance().mutex.unlock();
}

// Returns the communicator with this name, or null if there is none.
std::shared_ptr<Communicator> Named(const Registry& registry, const std::string& name) {
  for (const auto& [number, communicator] : registry.communicators) {
    if (communicator->name() == name) return communicator;
  }
  return nullptr;
}

}  // namespace

int64_t Register(std::shared_ptr<Communicator> communicator) {
  static const int hooked = pthread_atfork([] { Instance().mutex.lock(); },
                                           [] { Instance().mutex.unlock(); }, InForkedChild);
  (void)hooked;
  Registry& registry = Instance();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  // Rejects a name that is already in use, because a graph, which finds its communicator by name,
  // could otherwise silently use the wrong group.
  if (Named(registry, communicator->name())) {
    throw Error(Code::kInvalidArgument, "There is a communicator '" + communicator->name() +
                                            "' in this process already. Close it first, or give "
                                            "this one another name.");
  }
  registry.communicators[++registry.last] = std::move(communicator);
  return registry.last;
}

std::shared_ptr<Communicator> Find(int64_t number) {
  Registry& registry = Instance();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  const auto found = registry.communicators.find(number);
  if (found == registry.communicators.end()) {
    throw Error(Code::kClosed, "Communicator " + std::to_string(number) +
                                   " does not exist in this process, or has been closed.");
  }
  return found->second;
}

std::shared_ptr<Communicator> FindNamed(const std::string& name) {
  Registry& registry = Instance();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  if (auto found = Named(registry, name)) return found;
  throw Error(Code::kClosed, "There is no communicator '" + name +
                                 "' in this process, or it has been closed. Create the strategy, "
                                 "or split the group, before the function runs.");
}

std::shared_ptr<Communicator> Remove(int64_t number) {
  Registry& registry = Instance();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  const auto found = registry.communicators.find(number);
  if (found == registry.communicators.end()) return nullptr;
  std::shared_ptr<Communicator> communicator = std::move(found->second);
  registry.communicators.erase(found);
  return communicator;
}

std::vector<std::shared_ptr<Communicator>> All() {
  Registry& registry = Instance();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  std::vector<std::shared_ptr<Communicator>> all;
  for (const auto& [number, communicator] : registry.communicators) all.push_back(communicator);
  return all;
}

std::vector<std::shared_ptr<Communicator>> RemoveAll() {
  Registry& registry = Instance();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  std::vector<std::shared_ptr<Communicator>> all;
  for (auto& [number, communicator] : registry.communicators) {
    all.push_back(std::move(communicator));
  }
  registry.communicators.clear();
  return all;
}

}  // namespace tfdist
