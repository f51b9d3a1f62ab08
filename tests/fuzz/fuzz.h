// What a fuzz program consists of. fuzz_main.cpp or libFuzzer calls it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

// One input. Aborts (LARDER_CHECK) when a promise is broken.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace larder::fuzz {

using Input = std::vector<uint8_t>;

// Valid inputs to start from.
std::vector<Input> corpus(std::mt19937_64& engine);
// No input needs to be longer.
extern const size_t kMaxInputBytes;

}  // namespace larder::fuzz
