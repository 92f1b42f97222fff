#include "tls/streams.h"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "error.h"
#include "tls/tls_stream.h"
#include "transport/socket.h"

namespace tfdist {
namespace {

using Clock = std::chrono::steady_clock;
using Sockets = std::vector<std::unique_ptr<Socket>>;

constexpr int kPollMilliseconds = 100;

struct Greeting {
  TlsStream* stream;
  const std::string* name;  // of the rank at the other end
};

Sockets TakeOver(const std::vector<int>& descriptors) {
  Sockets sockets;
  for (const int descriptor : descriptors) {
    sockets.push_back(descriptor < 0 ? nullptr : std::make_unique<Socket>(descriptor));
  }
  return sockets;
}

Streams InTls(Sockets sockets, const TlsContext& context, int rank,
              const std::vector<std::string>& names, std::vector<Greeting>* greetings) {
  Streams streams(sockets.size());
  for (size_t other = 0; other < sockets.size(); ++other) {
    if (!sockets[other]) continue;
    const bool server = rank < static_cast<int>(other);
    auto stream = std::make_unique<TlsStream>(context, std::move(sockets[other]), server);
    greetings->push_back({stream.get(), &names[other]});
    streams[other] = std::move(stream);
  }
  return streams;
}

bool Advance(const Greeting& greeting) {
  try {
    return greeting.stream->Handshake();
  } catch (const Error& error) {
    throw Error(error.code(), *greeting.name + " cannot be reached in TLS: " + error.what() + ".");
  }
}

// All at once, so that one that is slow holds up no other.
void ShakeHands(std::vector<Greeting> greetings, double seconds) {
  const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
  for (;;) {
    greetings.erase(std::remove_if(greetings.begin(), greetings.end(), Advance), greetings.end());
    if (greetings.empty()) return;
    if (Clock::now() >= deadline) {
      char text[32];
      std::snprintf(text, sizeof(text), "%.1f s", seconds);
      throw Error(Code::kUnavailable,
                  *greetings.front().name + " did not begin TLS within " + text + ".");
    }
    std::vector<pollfd> polled;
    for (const Greeting& greeting : greetings) {
      polled.push_back({greeting.stream->descriptor(), greeting.stream->events(), 0});
    }
    poll(polled.data(), polled.size(), kPollMilliseconds);
  }
}

Streams InTheClear(Sockets sockets) {
  Streams streams;
  for (auto& socket : sockets) streams.push_back(std::move(socket));
  return streams;
}

}  // namespace

Connections Connect(int rank, const std::vector<std::string>& names,
                    const std::vector<int>& control, const std::vector<int>& data,
                    const TlsFiles& files, double seconds) {
  Sockets control_sockets = TakeOver(control), data_sockets = TakeOver(data);
  if (!files.any()) {
    return {InTheClear(std::move(control_sockets)), InTheClear(std::move(data_sockets))};
  }
  const TlsContext context(files);
  std::vector<Greeting> greetings;
  Connections connections{
      InTls(std::move(control_sockets), context, rank, names, &greetings),
      InTls(std::move(data_sockets), context, rank, names, &greetings)};
  ShakeHands(std::move(greetings), seconds);
  return connections;
}

}  // namespace tfdist
