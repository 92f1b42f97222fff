// Writes JSON as text.
#pragma once

#include <cstdint>
#include <string>

namespace tfdist {

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
    for (const char c : text) {
      const auto byte = static_cast<unsigned char>(c);
      if (c == '"' || c == '\\') {
        text_ += '\\';
        text_ += c;
      } else if (c == '\n') {
        text_ += "\\n";
      } else if (byte < ' ') {
        text_ += "\\u00";
        text_ += digits[byte >> 4];
        text_ += digits[byte & 15];
      } else {
        text_ += c;
      }
    }
    text_ += '"';
    return *this;
  }
  // What is JSON already: a value, or members of an object.
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
  void Separate() {
    if (!fresh_) text_ += ',';
    fresh_ = false;
  }

  std::string text_;
  bool fresh_ = true;  // nothing to be separated from
};

}  // namespace tfdist
