// An all-reduce of float32 values that are encoded before they are sent.
#pragma once

#include "collective/operation.h"
#include "collective/transfer.h"
#include "transport/fabric.h"

namespace tfdist {

// Throws Error(kInvalidArgument) unless the operation is a sum of float32 values, and its codec and
// residual are valid.
void CheckCompressible(const Operation& operation);

// Returns whether an all-reduce encodes any data. Data that stays within a host is encoded only if
// `within_hosts` is set. With a single rank, no data is encoded.
bool IsEncoded(const Topology& topology, const Compression& compression);

// Runs a compressed all-reduce. All members call this function together.
//
// Each part has an owner among the members. Each member encodes the values that it contributes to a
// part, and sends them to the owner. The owner decodes the values that it receives, and sums them
// with its own values in float32. It then encodes the sums, and sends the encoded sums to all
// members. Data is therefore encoded only twice on its way to the result, regardless of the number
// of members. The owner also decodes its own encoded sums, so that all members get the same bits.
//
// With error feedback, each rank's residual stores the errors of everything that this rank encodes:
// the values that it sends, and the sums of its own part. Nothing is lost for good: the sum of all
// ranks' inputs and old residuals equals the result plus the sum of all ranks' new residuals,
// except for rounding in float32.
//
// Args: error_begin: the offset in the residual, in bytes, of the element for the transfer's first
// value.
void RunCompressed(Fabric& fabric, const Fingerprint& joined, const Members& members,
                   const Transfer& transfer, const Compression& compression, size_t error_begin);

}  // namespace tfdist
