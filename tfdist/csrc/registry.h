// The communicators of this process, by number.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "communicator.h"

namespace tfdist {

// Returns the communicator's number, from 1; a number is never used again.
int64_t Register(std::shared_ptr<Communicator> communicator);

// Throws Error(kClosed) if there is none of this number any more.
std::shared_ptr<Communicator> Find(int64_t number);

// By the name of its group; of several the newest, so that a graph that was traced with one goes on
// with the one that has taken its place.
std::shared_ptr<Communicator> FindNamed(const std::string& name);

// Takes a communicator out; null if there is none.
std::shared_ptr<Communicator> Remove(int64_t number);

}  // namespace tfdist
