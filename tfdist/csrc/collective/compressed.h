// An all-reduce of float32 that sends encoded values.
#pragma once

#include "collective/operation.h"
#include "collective/transfer.h"
#include "transport/fabric.h"

namespace tfdist {

// Throws Error(kInvalidArgument) unless the operation is a sum of float32 with a valid codec and
// error.
void CheckCompressible(const Operation& operation);

// Whether any data are encoded. Data that stay within a host are encoded only on request, and only
// if there are several ranks.
bool IsEncoded(const Topology& topology, const Compression& compression);

// All members call this together. Each encodes its values of every part for the part's owner. The
// owner decodes them, sums them in float32, encodes the sum again, and sends it to all members. So
// there are two encoding errors, regardless of the number of members. The owner keeps the decoded
// sum, so that all members have the same bits.
//
// Each rank adds to its own error the loss of what it encodes: every member the loss of its values,
// and each owner also the loss of its sums. So the total of all inputs equals the total of all
// results plus the errors of all ranks.
//
// Args: error_begin: the offset of the transfer's first value in the compression's error.
void RunCompressed(Fabric& fabric, const Fingerprint& joined, const Members& members,
                   const Transfer& transfer, const Compression& compression, size_t error_begin);

}  // namespace tfdist
