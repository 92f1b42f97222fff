// Streams of bytes over TLS.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "tls/openssl.h"
#include "transport/socket.h"

namespace tfdist {

// A connection between two ranks in TLS, in which each has proven to be one of the job.
class TlsStream : public Stream {
 public:
  // One end of a connection is its server.
  TlsStream(const TlsContext& context, std::unique_ptr<Socket> socket, bool server);

  // Goes on with the handshake as far as that goes without waiting, and says whether it is done;
  // else descriptor() is to be polled for events(). After that of TLS both ends prove that they
  // have the job's secret, by an HMAC of keys that this connection alone has (RFC 8446, 7.5): a
  // proof that was given on another connection is worth nothing here. Throws Error(kUnavailable)
  // that says why the two do not come together.
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
  std::vector<char> out_;  // encrypted, and not sent yet from `sent_` on
  size_t sent_ = 0;
  size_t taken_ = 0;      // bytes of the caller's that are in `out_`
  bool ended_ = false;    // the other end has closed the connection
  int socket_error_ = 0;  // errno of the socket, once it is broken
};

// Makes streams of the connections of a group: in the clear, or in TLS once all have shaken hands.
//
// For each rank a stream, or none.
using Streams = std::vector<std::unique_ptr<Stream>>;

struct Connections {
  Streams control;
  Streams data;
};

// Args: this rank, what messages call each rank, for each rank two descriptors or -1, which are
// taken over even where this fails, what TLS needs if it is wanted, and how long it may take to
// begin. Of two ranks the lower one is the server. Throws Error that names who is missing.
Connections Connect(int rank, const std::vector<std::string>& names,
                    const std::vector<int>& control, const std::vector<int>& data,
                    const TlsFiles& files, double seconds);

}  // namespace tfdist
