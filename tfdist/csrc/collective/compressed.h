// An all-reduce of float32 values that are encoded before they are sent.
#pragma once

#include "collective/operation.h"
#include "collective/transfer.h"
#include "transport/fabric.h"

namespace tfdist {

// Throws Error(kInvalidArgument) unless the operation is a sum of float32, and its codec and
// residual are valid.
void CheckCompressible(const Operation& operation);

// Returns whether the operation encodes any data. Data that stay within a host are encoded only if
// `within_hosts` is set. With a single rank, no data are encoded.
bool IsEncoded(const Topology& topology, const Compression& compression);

// Runs a compressed all-reduce. All members call this function together.
//
// Each part has an owner among the members. Each member encodes its values of the part, and sends
// them to the owner. The owner decodes the values of all members, sums them in float32, encodes the
// sums, and sends the encoded sums to all members. So there are two encoding errors, regardless of
// the number of members. The owner also decodes its own encoded sums, so that all members have the
// same bits.
//
// With error feedback, each rank's residual receives the errors of everything that this rank
// encodes: its values, and the sums of its own part. So the total of all inputs equals the total of
// all results plus the residuals of all ranks.
//
// Args: error_begin: the offset of the transfer's first value in the residual, in bytes.
void RunCompressed(Fabric& fabric, const Fingerprint& joined, const Members& members,
                   const Transfer& transfer, const Compression& compression, size_t error_begin);

}  // namespace tfdist
