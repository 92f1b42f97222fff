// The registry of this process's communicators.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "communicator.h"

namespace tfdist {

// Registers a communicator, and returns the number that identifies it in this process. Numbers
// begin at 1 and are never reused. Throws Error(kInvalidArgument) if another registered
// communicator has the same name.
int64_t Register(std::shared_ptr<Communicator> communicator);

// Returns the communicator with this number. Throws Error(kClosed) if there is no such
// communicator, or if it has been closed.
std::shared_ptr<Communicator> Find(int64_t number);

// Returns the communicator with this name. A traced graph uses this function whenever it runs. If
// the communicator has been closed since the graph was traced, and a new one with the same name has
// been registered, the graph uses the new one. Throws Error(kClosed) if there is no communicator
// with this name.
std::shared_ptr<Communicator> FindNamed(const std::string& name);

// Removes the communicator with this number from the registry and returns it. Returns null if there
// is no such communicator.
std::shared_ptr<Communicator> Remove(int64_t number);

// Returns all communicators, oldest first.
std::vector<std::shared_ptr<Communicator>> All();

// Removes and returns all communicators.
std::vector<std::shared_ptr<Communicator>> RemoveAll();

}  // namespace tfdist
