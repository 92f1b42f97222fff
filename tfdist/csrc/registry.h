// The registry of this process's communicators.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "communicator.h"

namespace tfdist {

// Registers a communicator, and returns the number that identifies it. Numbers begin at 1 and are
// never reused. Throws Error(kInvalidArgument) if a communicator with this name is already
// registered.
int64_t Register(std::shared_ptr<Communicator> communicator);

// Returns the communicator with this number. Throws Error(kClosed) if there is none, or if it has
// been closed.
std::shared_ptr<Communicator> Find(int64_t number);

// Returns the communicator with this name. A traced graph finds its communicator by name. If the
// communicator has been closed since then, and another one with the same name has been registered,
// the graph uses the new one. Throws Error(kClosed) if there is no communicator with this name.
std::shared_ptr<Communicator> FindNamed(const std::string& name);

// Removes the communicator with this number from the registry and returns it; null if there is
// none.
std::shared_ptr<Communicator> Remove(int64_t number);

// Returns all communicators, oldest first.
std::vector<std::shared_ptr<Communicator>> All();

// Removes and returns all communicators.
std::vector<std::shared_ptr<Communicator>> RemoveAll();

}  // namespace tfdist
