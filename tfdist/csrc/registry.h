// The communicators of this process, by number.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "communicator.h"

namespace tfdist {

// Registers a communicator and returns its number, from 1, never reused. Throws
// Error(kInvalidArgument) if its name is already registered.
int64_t Register(std::shared_ptr<Communicator> communicator);

// Throws Error(kClosed) if no open communicator has this number.
std::shared_ptr<Communicator> Find(int64_t number);

// Finds a communicator by its group's name. A graph traced with a communicator that has since been
// closed continues with its successor. Throws Error(kClosed) if there is none.
std::shared_ptr<Communicator> FindNamed(const std::string& name);

// Removes a communicator and returns it; null if there is none.
std::shared_ptr<Communicator> Remove(int64_t number);

// Returns all communicators, oldest first.
std::vector<std::shared_ptr<Communicator>> All();

// Removes and returns all communicators.
std::vector<std::shared_ptr<Communicator>> RemoveAll();

}  // namespace tfdist
