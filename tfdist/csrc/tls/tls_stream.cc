#include "tls/tls_stream.h"

#include <poll.h>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <utility>

#include "error.h"
#include "transport/socket.h"

namespace tfdist {
namespace {

// The maximum number of bytes that are encrypted before they are sent. It is large enough to make
// the cost per call negligible, and small enough that the encrypted bytes stay in the CPU's caches.
constexpr size_t kMaxBytes = 128 << 10;

// RFC 5705 requires that labels that are not registered begin with EXPERIMENTAL.
constexpr char kLabel[] = "EXPERIMENTAL tfdist secret";
constexpr char kServer[] = "server", kClient[] = "client";

bool IsNotYet(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

// OpenSSL accesses the socket through these functions. If OpenSSL accessed the socket itself, a
// broken connection could raise SIGPIPE, and each record of 16 KiB would take a separate system
// call.
struct TlsStream::Callbacks {
  static TlsStream& Of(openssl::BIO* bio) {
    return *static_cast<TlsStream*>(openssl::Load().BIO_get_data(bio));
  }

  static int Read(openssl::BIO* bio, char* data, int bytes) {
    TlsStream& stream = Of(bio);
    openssl::Load().BIO_clear_flags(bio, openssl::kRetries);
    const ssize_t got = stream.socket_->Read(data, static_cast<size_t>(bytes));
    if (got == 0) stream.ended_ = true;
    if (got < 0 && IsNotYet(errno)) {
      openssl::Load().BIO_set_flags(bio, openssl::kRetryRead);
    } else if (got < 0) {
      stream.socket_error_ = errno;
    }
    return static_cast<int>(got);
  }

  static int Write(openssl::BIO* bio, const char* data, int bytes) {
    std::vector<char>& out = Of(bio).out_;
    out.insert(out.end(), data, data + bytes);
    return bytes;
  }

  static long Control(openssl::BIO*, int command, long, void*) {
    return command == openssl::kFlush ? 1 : 0;
  }

  static const openssl::BIO_METHOD* Method() {
    static const openssl::BIO_METHOD* const made = [] {
      const openssl::Library& ssl = openssl::Load();
      openssl::BIO_METHOD* const method =
          ssl.BIO_meth_new(ssl.BIO_get_new_index() | openssl::kSourceAndSink, "tfdist");
      ssl.BIO_meth_set_read(method, Read);
      ssl.BIO_meth_set_write(method, Write);
      ssl.BIO_meth_set_ctrl(method, Control);
      return method;
    }();
    return made;
  }
};

TlsStream::TlsStream(const TlsContext& context, std::unique_ptr<Socket> socket, bool server)
    : socket_(std::move(socket)), secret_(context.secret()), server_(server) {
  const openssl::Library& ssl = openssl::Load();
  ssl_.reset(ssl.SSL_new(context.get()));
  openssl::BIO* const bio = ssl_ ? ssl.BIO_new(Callbacks::Method()) : nullptr;
  if (!bio) throw Error(Code::kInternal, "OpenSSL cannot allocate another connection.");
  ssl.BIO_set_data(bio, this);
  ssl.BIO_set_init(bio, 1);
  ssl.SSL_set_bio(ssl_.get(), bio, bio);  // takes ownership of the BIO
  server ? ssl.SSL_set_accept_state(ssl_.get()) : ssl.SSL_set_connect_state(ssl_.get());
}

bool TlsStream::Handshake() {
  secured_ = secured_ || Secure();
  return secured_ && Prove();
}

bool TlsStream::Prove() {
  const auto advance = [](size_t* done, ssize_t some) {
    if (some > 0) {
      *done += static_cast<size_t>(some);
      return true;
    }
    if (some < 0 && IsNotYet(errno)) return false;
    throw Error(Code::kUnavailable, some == 0         ? "it has closed the connection"
                                    : errno == EPROTO ? openssl::Reason()
                                                      : std::strerror(errno));
  };
  const Proof own = ProofOf(server_ ? kServer : kClient);
  while (proof_sent_ < own.size()) {
    if (!advance(&proof_sent_, Write(own.data() + proof_sent_, own.size() - proof_sent_))) {
      return false;
    }
  }
  while (proof_received_ < received_.size()) {
    char* const rest = received_.data() + proof_received_;
    if (!advance(&proof_received_, Read(rest, received_.size() - proof_received_))) return false;
  }
  const Proof expected = ProofOf(server_ ? kClient : kServer);
  if (openssl::Load().CRYPTO_memcmp(expected.data(), received_.data(), expected.size()) != 0) {
    throw Error(Code::kUnavailable,
                "it does not have the secret; set the same TFDIST_SECRET on all workers");
  }
  return true;
}

TlsStream::Proof TlsStream::ProofOf(const char* role) const {
  const openssl::Library& ssl = openssl::Load();
  Proof keys, proof;
  const auto* context = reinterpret_cast<const unsigned char*>(role);
  auto* const to = reinterpret_cast<unsigned char*>(keys.data());
  if (ssl.SSL_export_keying_material(ssl_.get(), to, keys.size(), kLabel, sizeof(kLabel) - 1,
                                     context, std::strlen(role), 1) != 1) {
    throw Error(Code::kInternal,
                std::string("OpenSSL exports no keys: ") + openssl::Reason() + ".");
  }
  unsigned int bytes = 0;
  ssl.HMAC(ssl.EVP_sha256(), secret_.data(), static_cast<int>(secret_.size()), to, keys.size(),
           reinterpret_cast<unsigned char*>(proof.data()), &bytes);
  return proof;
}

bool TlsStream::Secure() {
  const openssl::Library& ssl = openssl::Load();
  const auto advance = [this, &ssl] {
    ssl.ERR_clear_error();
    const int result = ssl.SSL_do_handshake(ssl_.get());
    return result == 1 ? 0 : ssl.SSL_get_error(ssl_.get(), result);
  };
  int error = advance();
  // Sends pending bytes even if the handshake has failed, because they may contain a TLS alert that
  // tells the other end the reason.
  const bool flushed = Flush();
  if (error == 0 && !socket_error_) return flushed;
  // If the connection is broken, continues to read: the other end may have sent an alert before,
  // and the alert explains the cause better than the error of the socket.
  if (error == openssl::kWantRead && socket_error_) error = advance();
  if (error == openssl::kWantRead && !socket_error_) return false;
  const long verified = ssl.SSL_get_verify_result(ssl_.get());
  if (verified != openssl::kVerified) {
    throw Error(Code::kUnavailable, ssl.X509_verify_cert_error_string(verified));
  }
  if (error == openssl::kProtocol && !ended_) throw Error(Code::kUnavailable, openssl::Reason());
  throw Error(Code::kUnavailable,
              socket_error_ ? std::strerror(socket_error_) : "it has closed the connection");
}

short TlsStream::events() const {
  return static_cast<short>(sent_ < out_.size() ? POLLOUT : POLLIN);
}

ssize_t TlsStream::Read(char* data, size_t bytes) {
  const openssl::Library& ssl = openssl::Load();
  size_t read = 0;
  ssl.ERR_clear_error();
  while (read < bytes) {
    const size_t some = std::min(bytes - read, size_t{1} << 30);
    const int got = ssl.SSL_read(ssl_.get(), data + read, static_cast<int>(some));
    if (got <= 0) return read > 0 ? static_cast<ssize_t>(read) : Failed(got);
    read += static_cast<size_t>(got);
  }
  return static_cast<ssize_t>(read);
}

ssize_t TlsStream::Write(const char* data, size_t bytes) {
  if (taken_ == 0) {
    taken_ = std::min(bytes, kMaxBytes);
    openssl::Load().ERR_clear_error();
    const int result = openssl::Load().SSL_write(ssl_.get(), data, static_cast<int>(taken_));
    if (result <= 0) {
      taken_ = 0;
      return Failed(result);
    }
  }
  // The caller's bytes count as written only after their encrypted form has been sent, so the
  // caller does not need to flush the stream.
  if (!Flush()) {
    errno = socket_error_ ? socket_error_ : EAGAIN;
    return -1;
  }
  return static_cast<ssize_t>(std::exchange(taken_, 0));
}

ssize_t TlsStream::Failed(int result) {
  const int error = openssl::Load().SSL_get_error(ssl_.get(), result);
  if (error == openssl::kZeroReturn) return 0;
  if (socket_error_) {
    errno = socket_error_;
  } else if (ended_) {
    return 0;
  } else {
    errno = error == openssl::kWantRead ? EAGAIN : EPROTO;
  }
  return -1;
}

bool TlsStream::Flush() {
  while (sent_ < out_.size()) {
    const ssize_t sent = socket_->Write(out_.data() + sent_, out_.size() - sent_);
    if (sent < 0) {
      if (!IsNotYet(errno)) socket_error_ = errno;
      return false;
    }
    sent_ += static_cast<size_t>(sent);
  }
  out_.clear();
  sent_ = 0;
  return true;
}

void TlsStream::Free::operator()(openssl::SSL* ssl) const { openssl::Load().SSL_free(ssl); }

namespace {

using Clock = std::chrono::steady_clock;
using Sockets = std::vector<std::unique_ptr<Socket>>;

constexpr int kPollMilliseconds = 100;

struct Greeting {
  TlsStream* stream;
  const std::string* name;  // the name of the rank at the other end
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

// Runs all handshakes concurrently, so that a slow handshake does not delay the others.
void ShakeHands(std::vector<Greeting> greetings, double seconds) {
  const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
  for (;;) {
    greetings.erase(std::remove_if(greetings.begin(), greetings.end(), Advance), greetings.end());
    if (greetings.empty()) return;
    if (Clock::now() >= deadline) {
      char text[32];
      std::snprintf(text, sizeof(text), "%.1f s", seconds);
      throw Error(
          Code::kUnavailable,
          *greetings.front().name + " did not complete the TLS handshake within " + text + ".");
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
  Connections connections{InTls(std::move(control_sockets), context, rank, names, &greetings),
                          InTls(std::move(data_sockets), context, rank, names, &greetings)};
  ShakeHands(std::move(greetings), seconds);
  return connections;
}

}  // namespace tfdist
