#include "tls/openssl.h"

#include <dlfcn.h>

#include <string>

#include "error.h"

namespace tfdist::openssl {
namespace {

// The interface of 1.1 is a part of that of 3.
constexpr const char* kNames[] = {"libssl.so.3", "libssl.so.1.1"};

void* Open() {
  // First the one that Python has loaded, wherever it was: two in one process are one too many.
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
    void* const found = dlsym(opened, name);  // also in libcrypto, which libssl brings
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
