// The codecs for each vector unit.
#pragma once

#include "codec/codec.h"

namespace tfdist {

void EncodeOnBaseline(const Codec& codec, const Encoding& encoding);
void EncodeOnAvx2(const Codec& codec, const Encoding& encoding);
void EncodeOnAvx512(const Codec& codec, const Encoding& encoding);
void DecodeOnBaseline(const Codec& codec, const Decoding& decoding);
void DecodeOnAvx2(const Codec& codec, const Decoding& decoding);
void DecodeOnAvx512(const Codec& codec, const Decoding& decoding);

}  // namespace tfdist
