// Teacher forcing: how many bits per byte a model needs for a text it is shown.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "client/examples/model_runner.h"

namespace larder::examples {

// Window w of a text is its bytes w*context .. w*context + context, both included: each of the
// first `context` bytes predicts the one after it. Windows share one byte and nothing else.
// Windows [first, first + num_windows) in one string. INVALID_ARGUMENT if the file has fewer.
Result<std::string> read_windows(const std::filesystem::path& path, int64_t first_window,
                                 int64_t num_windows, int32_t context_tokens);

// Mean of -log2 p(byte) over the windows' predictions, for one window [context + 1 bytes]. Takes a
// fresh sequence and releases it. prefill_rows: rows of one forward pass. `dump` may be null.
Result<double> score_window(ModelRunner& runner, std::string_view window, int32_t prefill_rows,
                            AttentionDump* dump);

}  // namespace larder::examples
