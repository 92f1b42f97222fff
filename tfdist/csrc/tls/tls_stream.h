// Streams of bytes over TLS.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "tls/openssl.h"
#include "transport/socket.h"

namespace tfdist {

// A TLS connection between two ranks that have proven to each other that they belong to the job.
class TlsStream : public Stream {
 public:
  // Args: server: whether this end of the connection is the TLS server. Exactly one end must be the
  // server.
  TlsStream(const TlsContext& context, std::unique_ptr<Socket> socket, bool server);

  // Advances the handshake without blocking, and returns whether the handshake is complete. If it
  // is not, poll descriptor() for events(), and call this function again.
  //
  // After the TLS handshake, both ends prove that they know the job's secret. A proof is an HMAC of
  // keys that are unique to this connection (RFC 8446, 7.5), so a proof from another connection is
  // worthless here. Throws Error(kUnavailable) with the reason if the handshake fails.
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
  std::vector<char> out_;  // encrypted data; the bytes from `sent_` on are unsent
  size_t sent_ = 0;
  size_t taken_ = 0;      // number of the caller's bytes that are encrypted in `out_`
  bool ended_ = false;    // whether the other end has closed the connection
  int socket_error_ = 0;  // errno of the socket if it is broken, otherwise 0
};

// For each rank, a stream to this rank, or null.
using Streams = std::vector<std::unique_ptr<Stream>>;

struct Connections {
  Streams control;
  Streams data;
};

// Creates streams from the connections of a group. If the TLS settings are not empty, the streams
// use TLS, and the function returns when all handshakes are complete. Of two ranks, the one with
// the lower number is the TLS server. If a rank cannot be reached, throws Error with the name of
// that rank.
// Args: rank: this rank; names: each rank's name in messages; control, data: for each rank, a
// descriptor or -1; files: the TLS settings; seconds: the time limit. The function takes ownership
// of all descriptors, even if it fails.
Connections Connect(int rank, const std::vector<std::string>& names,
                    const std::vector<int>& control, const std::vector<int>& data,
                    const TlsFiles& files, double seconds);

}  // namespace tfdist
