// JSON as text: commas in the right places, and strings that every reader accepts.
#include "control/communicator_state.h"

#include "cpp/calls.h"

namespace tfdist::testing {
namespace {

void Structure() {
  JsonWriter json;
  json.Open('{').Member("a", int64_t{-1}).Key("b").Open('[').Close(']').Key("c").Open('[');
  json.Value(true).Null().Open('{').Close('}').Value(std::string("x")).Close(']');
  json.Raw("\"d\":1,\"e\":2").Member("f", false).Close('}');
  EXPECT(json.text() == R"({"a":-1,"b":[],"c":[true,null,{},"x"],"d":1,"e":2,"f":false})");
}

void Strings() {
  const struct {
    std::string text, written;
  } kStrings[] = {
      {"", R"("")"},
      {"a \"quoted\" back\\slash", R"("a \"quoted\" back\\slash")"},
      {std::string("\n\t\x1f\0", 4), R"("\n\u0009\u001f\u0000")"},
      {"\x7f", "\"\x7f\""},
      // Characters of two, three and four bytes, and the last valid one.
      {"Gr\xc3\xb6\xc3\x9f"
       "e \xe2\x82\xac \xf0\x9f\x98\x80 \xf4\x8f\xbf\xbf",
       "\"Gr\xc3\xb6\xc3\x9f"
       "e \xe2\x82\xac \xf0\x9f\x98\x80 \xf4\x8f\xbf\xbf\""},
      // The rest of a truncated character, at the end and at the beginning.
      {"x\xe2\x82", R"("x\ufffd\ufffd")"},
      {"\x82\xacy", R"("\ufffd\ufffdy")"},
      {"\xc3", R"("\ufffd")"},
      {"\xc3\"", R"("\ufffd\"")"},
      // Invalid encodings: overlong, a surrogate, out of range, no first byte.
      {"\xc0\xaf", R"("\ufffd\ufffd")"},
      {"\xe0\x80\xaf", R"("\ufffd\ufffd\ufffd")"},
      {"\xed\xa0\x80", R"("\ufffd\ufffd\ufffd")"},
      {"\xf0\x80\x80\xaf", R"("\ufffd\ufffd\ufffd\ufffd")"},
      {"\xf4\x90\x80\x80", R"("\ufffd\ufffd\ufffd\ufffd")"},
      {"\xff", R"("\ufffd")"},
  };
  for (const auto& [text, written] : kStrings) {
    JsonWriter json;
    json.Value(text);
    if (json.text() != written) throw Failure(json.text() + " instead of " + written);
  }
}

}  // namespace
}  // namespace tfdist::testing

int main() {
  using namespace tfdist::testing;
  return Report([] {
    Structure();
    Strings();
  });
}
