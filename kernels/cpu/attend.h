// attend on the CPU: decode and chunked prefill over one layer's blocks.
//
// A row's result depends on its q and on the keys it sees, and on nothing else, bit for bit: not on
// the batch, not on how many rows of its sequence share the call, not on where its blocks lie. Keys
// are taken in tiles that begin at multiples of kTileKeys from the start of the sequence, and
// within every sum in rising order, whichever rows share a tile. So decoding a token and prefilling
// it give the same bits on one machine (another vector instruction set may round differently). With
// num_splits the sequence's own lengths say where its keys are cut: every call is as
// AttendParams::deterministic asks, and shared_prefix_tokens is not looked at.
#pragma once

#include "kernels/params.h"
#include "larder/status.h"

namespace larder::kernels::cpu {

inline constexpr int64_t kTileKeys = 64;  // keys decoded at a time
// Keys whose weighted V are summed in float32, from multiples of it on; longer sequences add such
// sums up in float64, since a float32 sum of hundreds of thousands of values stands still.
inline constexpr int64_t kStretchKeys = 4096;
inline constexpr int64_t kTileRows = 64;  // query rows (token and head) that share a decoded tile

Status supports_attend(const AttendParams& params);

// The params have passed validate_attend and supports_attend.
void attend(const AttendParams& params);

}  // namespace larder::kernels::cpu
