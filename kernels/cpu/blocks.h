// copy, scrub and checksum on the CPU: the bytes of whole blocks, whatever they mean.
#pragma once

#include "kernels/params.h"
#include "larder/status.h"

namespace larder::kernels::cpu {

Status supports_copy(const CopyParams& params);
Status supports_scrub(const ScrubParams& params);
Status supports_checksum(const ChecksumParams& params);

// The params have passed the op's validation. The bound of each is memory: layers that lie back to
// back in a block are taken as one stretch. What lies between the layers of a block, and between
// blocks, is neither read nor written.
void copy(const CopyParams& params);
void scrub(const ScrubParams& params);
void checksum(const ChecksumParams& params);

}  // namespace larder::kernels::cpu
