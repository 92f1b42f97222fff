// The state of a communicator, and functions that write this state as JSON.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "control/flight_log.h"
#include "control/watch.h"
#include "error.h"
#include "transport/fabric.h"
#include "transport/socket.h"

namespace tfdist {

// Builds a JSON text.
class JsonWriter {
 public:
  JsonWriter& Open(char bracket) {
    Separate();
    text_ += bracket;
    fresh_ = true;
    return *this;
  }
  JsonWriter& Close(char bracket) {
    text_ += bracket;
    fresh_ = false;
    return *this;
  }
  JsonWriter& Key(const char* name) {
    Value(std::string(name));
    text_ += ':';
    fresh_ = true;
    return *this;
  }
  JsonWriter& Value(int64_t number) { return Raw(std::to_string(number)); }
  JsonWriter& Value(bool truth) { return Raw(truth ? "true" : "false"); }
  JsonWriter& Null() { return Raw("null"); }
  JsonWriter& Value(const std::string& text) {
    static const char* const digits = "0123456789abcdef";
    Separate();
    text_ += '"';
    for (size_t at = 0; at < text.size();) {
      const size_t bytes = Utf8Bytes(text, at);
      const auto byte = static_cast<unsigned char>(text[at]);
      if (bytes == 0) {
        // This byte is not part of a valid UTF-8 character. This happens if a long text has been
        // cut within a character, or if another rank has sent invalid text.
        text_ += "\\ufffd";
      } else if (byte == '"' || byte == '\\') {
        text_ += '\\';
        text_ += text[at];
      } else if (byte == '\n') {
        text_ += "\\n";
      } else if (byte < ' ') {
        text_ += "\\u00";
        text_ += digits[byte >> 4];
        text_ += digits[byte & 15];
      } else {
        text_.append(text, at, bytes);
      }
      at += bytes ? bytes : 1;
    }
    text_ += '"';
    return *this;
  }
  // Appends `json`, which must already be in JSON format: a value, or the members of an object.
  JsonWriter& Raw(const std::string& json) {
    Separate();
    text_ += json;
    return *this;
  }
  template <typename T>
  JsonWriter& Member(const char* name, const T& value) {
    return Key(name).Value(value);
  }

  const std::string& text() const { return text_; }

 private:
  // Returns the length in bytes of the UTF-8 character that begins at the index `at`. Returns 0 if
  // no valid character begins there.
  static size_t Utf8Bytes(const std::string& text, size_t at) {
    const auto byte = [&](size_t i) {
      return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
    };
    const unsigned first = byte(at), second = byte(at + 1);
    const size_t bytes = first < 0x80   ? 1
                         : first < 0xC2 ? 0
                         : first < 0xE0 ? 2
                         : first < 0xF0 ? 3
                         : first < 0xF5 ? 4
                                        : 0;
    for (size_t i = 1; i < bytes; ++i) {
      if ((byte(at + i) & 0xC0) != 0x80) return 0;
    }
    // Rejects overlong encodings, UTF-16 surrogates, and codes beyond the last Unicode character.
    if ((first == 0xE0 && second < 0xA0) || (first == 0xED && second >= 0xA0) ||
        (first == 0xF0 && second < 0x90) || (first == 0xF4 && second >= 0x90)) {
      return 0;
    }
    return bytes;
  }

  void Separate() {
    if (!fresh_) text_ += ',';
    fresh_ = false;
  }

  std::string text_;
  bool fresh_ = true;  // whether the next value needs no comma before it
};

// Describes why a communicator was aborted, and which operation of this rank failed last.
struct AbortState {
  // An operation of this rank that failed. Its times are in nanoseconds of the steady clock.
  struct Detected {
    std::string operation;
    int rank = 0;
    uint64_t sequence = 0;
    int64_t begun = 0;
    int64_t ended = 0;
  };

  Error cause;
  int64_t at = 0;  // the time when this rank learned of the abort
  // The last operation that failed. Not set if no operation has failed.
  std::optional<Detected> detected;
};

// Writes the state as a JSON object. docs/guide/monitoring.md describes the object's members.
void Write(const AbortState& state, JsonWriter* json);

// A snapshot of a communicator's state.
struct CommunicatorState {
  std::string name;
  const Topology* topology = nullptr;
  std::optional<AbortState> aborted;
  // Descriptions of the queued operations, which wait until the running operation ends.
  std::vector<std::string> waiting;
  std::vector<Watch::Known> others;
  std::vector<TcpStatistics> links;  // statistics of the connection to each rank
  Recorder::Log log;
};

// Writes the state as a JSON object. docs/guide/monitoring.md describes the object's members.
void Write(const CommunicatorState& state, JsonWriter* json);

}  // namespace tfdist
