#include "device/assembly.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <utility>

namespace tfdist {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLook = std::chrono::milliseconds(20);

std::string Named(size_t gpu) { return "GPU " + std::to_string(gpu); }

}  // namespace

void Assembly::Add(size_t gpu, Operation part, Done done) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (ended_) {
    const Error late = error_ ? *error_
                              : Error(Code::kInternal, "The operation has ended without this GPU.");
    lock.unlock();
    return done(&late);
  }
  parts_[gpu] = {std::move(part), std::move(done)};
  --missing_;
  changed_.notify_all();
}

std::vector<Operation> Assembly::Await(double seconds, const std::function<bool()>& ends) {
  const auto begin = Clock::now();
  std::unique_lock<std::mutex> lock(mutex_);
  while (missing_ > 0) {
    changed_.wait_for(lock, kLook);
    if (missing_ == 0) break;
    if (ends()) return {};
    if (Clock::now() - begin < std::chrono::duration<double>(seconds)) continue;
    const auto is_missing = [](const Part& part) { return !part.operation; };
    const auto missing = std::find_if(parts_.begin(), parts_.end(), is_missing);
    const auto come = std::find_if_not(parts_.begin(), parts_.end(), is_missing);
    char waited[32];
    std::snprintf(waited, sizeof(waited), "%g s.", seconds);
    throw Error(Code::kUnavailable,
                Named(static_cast<size_t>(missing - parts_.begin())) +
                    " of this process has not come to " +
                    Describe(come->operation->fingerprint) + ", where " +
                    Named(static_cast<size_t>(come - parts_.begin())) + " has waited for " + waited);
  }
  CheckAlike();
  std::vector<Operation> parts;
  for (Part& part : parts_) parts.push_back(std::move(*part.operation));
  return parts;
}

void Assembly::CheckAlike() const {
  const Fingerprint& first = parts_[0].operation->fingerprint;
  for (size_t gpu = 1; gpu < parts_.size(); ++gpu) {
    const Fingerprint& other = parts_[gpu].operation->fingerprint;
    if (!Agree(first, other)) throw Disagreement(Named(0), first, Named(gpu), other);
  }
}

void Assembly::End(const Error* error) {
  std::vector<Done> waiting;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
    if (error) error_ = *error;
    for (Part& part : parts_) {
      if (part.done) waiting.push_back(std::move(part.done));
    }
  }
  for (const Done& done : waiting) done(error);
}

std::shared_ptr<Assembly> Assemblies::Next(size_t gpu, bool* is_first) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto next = std::find_if(open_.begin(), open_.end(),
                           [gpu](const Open& open) { return !open.come[gpu]; });
  *is_first = next == open_.end();
  if (*is_first) {
    next = open_.insert(next, {std::make_shared<Assembly>(gpus_), std::vector<bool>(gpus_)});
  }
  next->come[gpu] = true;
  const std::shared_ptr<Assembly> found = next->assembly;
  if (std::all_of(next->come.begin(), next->come.end(), [](bool come) { return come; })) {
    open_.erase(next);
  }
  return found;
}

void Assemblies::Drop(const Assembly* ended) {
  const std::lock_guard<std::mutex> lock(mutex_);
  open_.remove_if([ended](const Open& open) { return open.assembly.get() == ended; });
}

}  // namespace tfdist
