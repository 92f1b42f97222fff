// The communicators of this process, by number.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "communicator.h"

namespace tfdist {

// Returns the communicator's number, from 1; a number is never used again. Throws
// Error(kInvalidArgument) if there is one of its name.
int64_t Register(std::shared_ptr<Communicator> communicator);

// Throws Error(kClosed) if there is none of this number any more.
std::shared_ptr<Communicator> Find(int64_t number);

// By the name of its group; a graph that was traced with one that has been closed goes on with its
// successor. Throws Error(kClosed) if there is none.
std::shared_ptr<Communicator> FindNamed(const std::string& name);

// Takes a communicator out; null if there is none.
std::shared_ptr<Communicator> Remove(int64_t number);

// All of them, oldest first.
std::vector<std::shared_ptr<Communicator>> All();

// Takes all of them out.
std::vector<std::shared_ptr<Communicator>> RemoveAll();

}  // namespace tfdist
