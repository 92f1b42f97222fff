#include "tls/openssl.h"

#include <dlfcn.h>
#include <string>

#include "error.h"

namespace tfdist::openssl {
namespace {

// The core uses only the interface of OpenSSL 1.1, which OpenSSL 3 also provides.
constexpr const char* kNames[] = {"libssl.so.3", "libssl.so.1.1"};

void* Open() {
  // If the process has already loaded one of these libraries, for example through Python, uses that
  // library. Two different OpenSSL libraries in one process could conflict.
  for (const int flags : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW}) {
    for (const char* name : kNames) {
      if (void* const library = dlopen(name, flags)) return library;
    }
  }
  throw Error(Code::kInvalidArgument,
              "TLS between the workers needs OpenSSL, and neither libssl.so.3 nor libssl.so.1.1 "
              "was found: install it (apt-get install libssl3), or unset TFDIST_TLS_CERTIFICATE, "
              "TFDIST_TLS_KEY and TFDIST_TLS_CA on all workers.");
}

Library Resolve() {
  void* const opened = Open();
  const auto find = [opened](const char* name) {
    void* const found = dlsym(opened, name);  // also searches libcrypto, which libssl loads
    if (!found) {
      throw Error(Code::kInvalidArgument, std::string("TLS between the workers needs OpenSSL ") +
                                              "1.1.1 or newer; the one found lacks " + name +
                                              ": install a newer one.");
    }
    return found;
  };
  Library library;
#define TFDIST_RESOLVE(name, result, arguments) \
  library.name = reinterpret_cast<result(*) arguments>(find(#name));
  TFDIST_OPENSSL(TFDIST_RESOLVE)
#undef TFDIST_RESOLVE
  return library;
}

}  // namespace

const Library& Load() {
  static const Library library = Resolve();
  return library;
}

const char* Reason() {
  const Library& ssl = Load();
  const unsigned long error = ssl.ERR_get_error();
  ssl.ERR_clear_error();
  const char* const reason = error ? ssl.ERR_reason_error_string(error) : nullptr;
  return reason ? reason : "unknown reason";
}

}  // namespace tfdist::openssl

namespace tfdist {
namespace {

// The cipher suites, in order of preference. The first one is strong enough, and it is the fastest
// one on processors with AES instructions.
constexpr char kCiphers[] =
    "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";

constexpr size_t kReadBytes = 128 << 10;

// Reports that there is no passphrase. Otherwise, OpenSSL would ask for the passphrase of an
// encrypted key at the terminal.
int NoPassphrase(char*, int, int, void*) { return -1; }

void Check(bool done, const std::string& what, const std::string& path) {
  if (done) return;
  throw Error(Code::kInvalidArgument, "The " + what + " for TLS cannot be used: " + path + " (" +
                                          openssl::Reason() +
                                          "). Run tfdist doctor with the same settings.");
}

}  // namespace

TlsContext::TlsContext(const TlsFiles& files) : secret_(files.secret) {
  const openssl::Library& ssl = openssl::Load();
  ssl.ERR_clear_error();
  context_.reset(ssl.SSL_CTX_new(ssl.TLS_method()));
  openssl::SSL_CTX* const context = get();
  if (!context) {
    throw Error(Code::kInternal, std::string("OpenSSL cannot start: ") + openssl::Reason() + ".");
  }
  ssl.SSL_CTX_ctrl(context, openssl::kSetMinimumVersion, openssl::kTls13, nullptr);
  // Connections are never resumed, so sessions are not cached.
  ssl.SSL_CTX_ctrl(context, openssl::kSetSessionCache, 0, nullptr);
  ssl.SSL_CTX_set_num_tickets(context, 0);
  // Allows OpenSSL to read more than one TLS record (16 KiB) from the socket per call.
  ssl.SSL_CTX_ctrl(context, openssl::kSetReadAhead, 1, nullptr);
  ssl.SSL_CTX_set_default_read_buffer_len(context, kReadBytes);
  ssl.SSL_CTX_set_options(context, openssl::kNoTicket | openssl::kNoRenegotiation);
  // This call fails only if a policy of the system forbids these cipher suites. The failure is
  // ignored, and the system's choice remains.
  ssl.SSL_CTX_set_ciphersuites(context, kCiphers);
  ssl.SSL_CTX_set_verify(context, openssl::kVerifyBoth, nullptr);
  ssl.SSL_CTX_set_default_passwd_cb(context, NoPassphrase);
  Check(ssl.SSL_CTX_use_certificate_chain_file(context, files.certificate.c_str()) == 1,
        "certificate", files.certificate);
  Check(ssl.SSL_CTX_use_PrivateKey_file(context, files.key.c_str(), openssl::kPem) == 1, "key",
        files.key);
  Check(ssl.SSL_CTX_load_verify_locations(context, files.ca.c_str(), nullptr) == 1, "CA", files.ca);
}

void TlsContext::Free::operator()(openssl::SSL_CTX* context) const {
  openssl::Load().SSL_CTX_free(context);
}

}  // namespace tfdist
