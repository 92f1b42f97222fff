// Streams of bytes over TLS.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "tls/openssl.h"
#include "transport/socket.h"

namespace tfdist {

// A TLS connection between two ranks that have proven to belong to the job.
class TlsStream : public Stream {
 public:
  // Args: server: whether this end is the server; exactly one end must be.
  TlsStream(const TlsContext& context, std::unique_ptr<Socket> socket, bool server);

  // Advances the handshake without blocking, and returns whether it is done. If not, poll
  // descriptor() for events(). After the TLS handshake, both ends prove that they have the job's
  // secret, by an HMAC of keys unique to this connection (RFC 8446, 7.5): a proof from another
  // connection is worthless here. Throws Error(kUnavailable) with the reason if the handshake
  // fails.
  bool Handshake();
  short events() const;

  ssize_t Read(char* data, size_t bytes) override;
  ssize_t Write(const char* data, size_t bytes) override;
  int descriptor() const override { return socket_->descriptor(); }

 private:
  struct Free {
    void operator()(openssl::SSL* ssl) const;
  };
  struct Callbacks;
  using Proof = std::array<char, 32>;

  bool Secure();
  bool Prove();
  Proof ProofOf(const char* role) const;
  ssize_t Failed(int result);
  bool Flush();

  const std::unique_ptr<Socket> socket_;
  const std::string secret_;
  const bool server_;
  bool secured_ = false;
  size_t proof_sent_ = 0;
  size_t proof_received_ = 0;
  Proof received_;
  std::unique_ptr<openssl::SSL, Free> ssl_;
  std::vector<char> out_;  // encrypted data, unsent from `sent_` on
  size_t sent_ = 0;
  size_t taken_ = 0;      // the caller's bytes in `out_`
  bool ended_ = false;    // the other end has closed the connection
  int socket_error_ = 0;  // errno of the socket, once it is broken
};

// For each rank, its stream, or null.
using Streams = std::vector<std::unique_ptr<Stream>>;

struct Connections {
  Streams control;
  Streams data;
};

// Makes streams from a group's connections: unencrypted, or in TLS once all handshakes are done.
// Args: this rank; each rank's name in messages; two descriptors per rank, or -1, owned by this
// call even if it fails; the TLS settings, if any; the time limit. Of two ranks, the lower one is
// the server. Throws Error naming a rank that cannot be reached.
Connections Connect(int rank, const std::vector<std::string>& names,
                    const std::vector<int>& control, const std::vector<int>& data,
                    const TlsFiles& files, double seconds);

}  // namespace tfdist
