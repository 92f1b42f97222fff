// The interface to OpenSSL, which is loaded at run time, and the OpenSSL context of a communicator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

// The OpenSSL functions that the core uses. They are loaded at run time, so OpenSSL's headers are
// not needed to build the core, and the process uses the same OpenSSL library as Python.

namespace tfdist::openssl {

struct SSL;
struct SSL_CTX;
struct SSL_METHOD;
struct BIO;
struct BIO_METHOD;
struct EVP_MD;

// Constants that are the same in OpenSSL 1.1 and OpenSSL 3.
constexpr int kPem = 1;                          // SSL_FILETYPE_PEM
constexpr int kVerifyBoth = 1 | 2;               // SSL_VERIFY_PEER, SSL_VERIFY_FAIL_IF_NO_PEER_CERT
constexpr int kSetMinimumVersion = 123;          // SSL_CTRL_SET_MIN_PROTO_VERSION
constexpr int kSetReadAhead = 41;                // SSL_CTRL_SET_READ_AHEAD
constexpr int kSetSessionCache = 44;             // SSL_CTRL_SET_SESS_CACHE_MODE
constexpr long kTls13 = 0x0304;                  // TLS1_3_VERSION
constexpr uint64_t kNoTicket = 1u << 14;         // SSL_OP_NO_TICKET
constexpr uint64_t kNoRenegotiation = 1u << 30;  // SSL_OP_NO_RENEGOTIATION
constexpr int kProtocol = 1;                     // SSL_ERROR_SSL
constexpr int kWantRead = 2;                     // SSL_ERROR_WANT_READ
constexpr int kZeroReturn = 6;                   // SSL_ERROR_ZERO_RETURN
constexpr int kSourceAndSink = 0x0400;           // BIO_TYPE_SOURCE_SINK
constexpr int kRetryRead = 0x01 | 0x08;          // BIO_FLAGS_READ, BIO_FLAGS_SHOULD_RETRY
constexpr int kRetries = 0x0f;                   // BIO_FLAGS_RWS, BIO_FLAGS_SHOULD_RETRY
constexpr int kFlush = 11;                       // BIO_CTRL_FLUSH
constexpr long kVerified = 0;                    // X509_V_OK

// The name, return type and parameters of each function.
#define TFDIST_OPENSSL(F)                                                                   \
  F(TLS_method, const SSL_METHOD*, ())                                                      \
  F(SSL_CTX_new, SSL_CTX*, (const SSL_METHOD*))                                             \
  F(SSL_CTX_free, void, (SSL_CTX*))                                                         \
  F(SSL_CTX_ctrl, long, (SSL_CTX*, int, long, void*))                                       \
  F(SSL_CTX_set_options, uint64_t, (SSL_CTX*, uint64_t))                                    \
  F(SSL_CTX_set_verify, void, (SSL_CTX*, int, void*))                                       \
  F(SSL_CTX_set_num_tickets, int, (SSL_CTX*, size_t))                                       \
  F(SSL_CTX_set_default_read_buffer_len, void, (SSL_CTX*, size_t))                          \
  F(SSL_CTX_set_ciphersuites, int, (SSL_CTX*, const char*))                                 \
  F(SSL_CTX_set_default_passwd_cb, void, (SSL_CTX*, int (*)(char*, int, int, void*)))       \
  F(SSL_CTX_use_certificate_chain_file, int, (SSL_CTX*, const char*))                       \
  F(SSL_CTX_use_PrivateKey_file, int, (SSL_CTX*, const char*, int))                         \
  F(SSL_CTX_load_verify_locations, int, (SSL_CTX*, const char*, const char*))               \
  F(SSL_new, SSL*, (SSL_CTX*))                                                              \
  F(SSL_free, void, (SSL*))                                                                 \
  F(SSL_set_bio, void, (SSL*, BIO*, BIO*))                                                  \
  F(SSL_set_accept_state, void, (SSL*))                                                     \
  F(SSL_set_connect_state, void, (SSL*))                                                    \
  F(SSL_do_handshake, int, (SSL*))                                                          \
  F(SSL_read, int, (SSL*, void*, int))                                                      \
  F(SSL_write, int, (SSL*, const void*, int))                                               \
  F(SSL_get_error, int, (const SSL*, int))                                                  \
  F(SSL_get_verify_result, long, (const SSL*))                                              \
  F(SSL_export_keying_material, int,                                                        \
    (SSL*, unsigned char*, size_t, const char*, size_t, const unsigned char*, size_t, int)) \
  F(EVP_sha256, const EVP_MD*, ())                                                          \
  F(HMAC, unsigned char*,                                                                   \
    (const EVP_MD*, const void*, int, const unsigned char*, size_t, unsigned char*,         \
     unsigned int*))                                                                        \
  F(CRYPTO_memcmp, int, (const void*, const void*, size_t))                                 \
  F(X509_verify_cert_error_string, const char*, (long))                                     \
  F(ERR_get_error, unsigned long, ())                                                       \
  F(ERR_clear_error, void, ())                                                              \
  F(ERR_reason_error_string, const char*, (unsigned long))                                  \
  F(BIO_get_new_index, int, ())                                                             \
  F(BIO_meth_new, BIO_METHOD*, (int, const char*))                                          \
  F(BIO_meth_set_read, int, (BIO_METHOD*, int (*)(BIO*, char*, int)))                       \
  F(BIO_meth_set_write, int, (BIO_METHOD*, int (*)(BIO*, const char*, int)))                \
  F(BIO_meth_set_ctrl, int, (BIO_METHOD*, long (*)(BIO*, int, long, void*)))                \
  F(BIO_new, BIO*, (const BIO_METHOD*))                                                     \
  F(BIO_set_data, void, (BIO*, void*))                                                      \
  F(BIO_get_data, void*, (BIO*))                                                            \
  F(BIO_set_init, void, (BIO*, int))                                                        \
  F(BIO_set_flags, void, (BIO*, int))                                                       \
  F(BIO_clear_flags, void, (BIO*, int))

struct Library {
#define TFDIST_MEMBER(name, result, arguments) result(*name) arguments = nullptr;
  TFDIST_OPENSSL(TFDIST_MEMBER)
#undef TFDIST_MEMBER
};

// Returns the functions of the OpenSSL library that this process uses, and loads the library on the
// first call. Throws Error if there is no such library.
const Library& Load();

// Returns the reason why this thread's last OpenSSL call failed, and clears OpenSSL's list of
// errors.
const char* Reason();

}  // namespace tfdist::openssl

namespace tfdist {

// The paths of the PEM files for TLS: the certificate and the key of this process, and the
// certificate of the authority that this process trusts. Either all three paths are set, or, if the
// connections do not use TLS, none of them.
struct TlsFiles {
  std::string certificate;
  std::string key;
  std::string ca;           // the authority that has signed all ranks' certificates
  std::string secret = {};  // a secret that all ranks know; empty if there is none

  bool any() const { return !(certificate.empty() && key.empty() && ca.empty()); }
};

// The OpenSSL context of all connections of a communicator. Several threads may use it
// concurrently.
class TlsContext {
 public:
  // Throws Error(kInvalidArgument) if OpenSSL is not found, or if OpenSSL cannot use the files.
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
