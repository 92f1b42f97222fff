// An all-reduce of float32 that sends encoded values.
#pragma once

#include "collective/operation.h"
#include "collective/transfer.h"
#include "transport/fabric.h"

namespace tfdist {

// Throws Error(kInvalidArgument) for what is no sum of float32, and where its codec or error is
// none.
void CheckCompressible(const Operation& operation);

// Whether anything of it is encoded: what does not leave a host stays as it is, unless asked for
// otherwise, and so does what has no one to go to.
bool IsEncoded(const Topology& topology, const Compression& compression);

// All members call this together. Each encodes its values of every part for the part's owner, which
// decodes them, sums them in float32, and sends the sum, encoded again, to everyone: two errors,
// however many members there are. The owner takes what it sent, so that all have the same bits.
//
// What an encoding loses goes into the error of the rank that encodes: of a part's values into
// everyone's, of its sum into the owner's. So all that was ever brought along is what came out plus
// the errors of all ranks.
//
// Args:
//   error_begin: where in the compression's error that of the transfer's first value lies.
void RunCompressed(Fabric& fabric, const Fingerprint& joined, const Members& members,
                   const Transfer& transfer, const Compression& compression, size_t error_begin);

}  // namespace tfdist
