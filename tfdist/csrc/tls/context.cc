#include "tls/context.h"

#include "error.h"

namespace tfdist {
namespace {

// The first is as strong as anyone needs here, and the fastest where there are AES instructions.
constexpr char kCiphers[] =
    "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";

constexpr size_t kReadBytes = 128 << 10;

// Instead of asking for a passphrase at the terminal.
int NoPassphrase(char*, int, int, void*) { return -1; }

void Check(bool done, const std::string& what, const std::string& path) {
  if (done) return;
  throw Error(Code::kInvalidArgument,
              "The " + what + " for TLS cannot be used: " + path + " (" + openssl::Reason() +
                  "). Run tfdist doctor with the same settings.");
}

}  // namespace

TlsContext::TlsContext(const TlsFiles& files) : secret_(files.secret) {
  const openssl::Library& ssl = openssl::Load();
  ssl.ERR_clear_error();
  context_.reset(ssl.SSL_CTX_new(ssl.TLS_method()));
  openssl::SSL_CTX* const context = get();
  if (!context) {
    throw Error(Code::kInternal, std::string("OpenSSL cannot begin: ") + openssl::Reason() + ".");
  }
  ssl.SSL_CTX_ctrl(context, openssl::kSetMinimumVersion, openssl::kTls13, nullptr);
  // No connection is resumed.
  ssl.SSL_CTX_ctrl(context, openssl::kSetSessionCache, 0, nullptr);
  ssl.SSL_CTX_set_num_tickets(context, 0);
  // More than one record of 16 KiB with each call.
  ssl.SSL_CTX_ctrl(context, openssl::kSetReadAhead, 1, nullptr);
  ssl.SSL_CTX_set_default_read_buffer_len(context, kReadBytes);
  ssl.SSL_CTX_set_options(context, openssl::kNoTicket | openssl::kNoRenegotiation);
  // Fails only where a policy of the system forbids them; then the system's own choice remains.
  ssl.SSL_CTX_set_ciphersuites(context, kCiphers);
  ssl.SSL_CTX_set_verify(context, openssl::kVerifyBoth, nullptr);
  ssl.SSL_CTX_set_default_passwd_cb(context, NoPassphrase);
  Check(ssl.SSL_CTX_use_certificate_chain_file(context, files.certificate.c_str()) == 1,
        "certificate", files.certificate);
  Check(ssl.SSL_CTX_use_PrivateKey_file(context, files.key.c_str(), openssl::kPem) == 1, "key",
        files.key);
  Check(ssl.SSL_CTX_load_verify_locations(context, files.ca.c_str(), nullptr) == 1, "CA",
        files.ca);
}

void TlsContext::Free::operator()(openssl::SSL_CTX* context) const {
  openssl::Load().SSL_CTX_free(context);
}

}  // namespace tfdist
