// The codecs, compiled separately for each vector unit.
#pragma once

#include "codec/codec.h"

namespace tfdist {

void EncodeOnBaseline(const Codec& codec, const EncodeArgs& args);
void EncodeOnAvx2(const Codec& codec, const EncodeArgs& args);
void EncodeOnAvx512(const Codec& codec, const EncodeArgs& args);
void DecodeOnBaseline(const Codec& codec, const DecodeArgs& args);
void DecodeOnAvx2(const Codec& codec, const DecodeArgs& args);
void DecodeOnAvx512(const Codec& codec, const DecodeArgs& args);

}  // namespace tfdist
