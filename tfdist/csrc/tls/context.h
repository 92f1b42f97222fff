// What this process proves itself with, and whom it trusts.
#pragma once

#include <memory>
#include <string>

#include "tls/openssl.h"

namespace tfdist {

// Paths of PEM files; all of them, or none for no TLS.
struct TlsFiles {
  std::string certificate;
  std::string key;
  std::string ca;  // by whom all ranks' certificates are signed
  std::string secret = {};  // what all ranks have besides; empty for none

  bool any() const { return !(certificate.empty() && key.empty() && ca.empty()); }
};

// Made once for all connections of a communicator; threads may share it.
class TlsContext {
 public:
  // Throws Error(kInvalidArgument) if there is no OpenSSL, or if it cannot use the files.
  explicit TlsContext(const TlsFiles& files);

  openssl::SSL_CTX* get() const { return context_.get(); }
  const std::string& secret() const { return secret_; }

 private:
  struct Free {
    void operator()(openssl::SSL_CTX* context) const;
  };
  std::unique_ptr<openssl::SSL_CTX, Free> context_;
  const std::string secret_;
};

}  // namespace tfdist
