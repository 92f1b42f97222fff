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

  // Advances the handshake without blocking, and returns whether it is complete. If it is not
  // complete, the caller must poll descriptor() for events() before it calls this function again.
  //
  // When the TLS handshake is complete, both ends also prove that they know the job's secret. A
  // proof is an HMAC of keys that are unique to this connection (RFC 8446, 7.5), so a proof that
  // was copied from another connection is rejected. Throws Error(kUnavailable) with the reason if
  // the handshake fails.
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
  // Encrypted data. The bytes before the index `sent_` have already been sent.
  std::vector<char> out_;
  size_t sent_ = 0;
  // The number of the caller's bytes that `out_` contains in encrypted form.
  size_t taken_ = 0;
  bool ended_ = false;    // whether the other end has closed the connection
  int socket_error_ = 0;  // errno of the socket after it has failed, otherwise 0
};

// For each rank, the stream to this rank, or null if there is none.
using Streams = std::vector<std::unique_ptr<Stream>>;

struct Connections {
  Streams control;
  Streams data;
};

// Creates streams from the connections of a group. If the TLS settings are not empty, the streams
// use TLS. The function then runs all handshakes concurrently, and returns when all of them are
// complete. In each pair of ranks, the rank with the lower number is the TLS server. Throws Error
// with the name of a rank if the handshake with this rank fails or does not end in time.
//
// The function takes ownership of all descriptors, even if it fails.
// Args:
//   rank: the rank of this process.
//   names: for each rank, its name in error messages.
//   control: for each rank, the descriptor of the control connection to it, or -1.
//   data: for each rank, the descriptor of the data connection to it, or -1.
//   files: the TLS settings.
//   seconds: the time limit for all handshakes together.
Connections Connect(int rank, const std::vector<std::string>& names,
                    const std::vector<int>& control, const std::vector<int>& data,
                    const TlsFiles& files, double seconds);

}  // namespace tfdist
