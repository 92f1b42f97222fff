// The codecs, compiled without optional vector instructions, so that they run on any processor of
// the architecture.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "codec/layout.h"
#include "codec/units.h"
#include "reduce/half.h"

namespace tfdist {
namespace {
#include "codec/kernels.inc"
}  // namespace

void EncodeOnBaseline(const Codec& codec, const EncodeArgs& args) { EncodeWith(codec, args); }
void DecodeOnBaseline(const Codec& codec, const DecodeArgs& args) { DecodeWith(codec, args); }

}  // namespace tfdist
