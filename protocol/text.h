// Private to protocol: text that may be printed, logged and put into JSON or a metric's label.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace larder::protocol {

// Valid UTF-8 without control characters (below 0x20, 0x7f, and U+0080 to U+009F).
bool is_printable(std::string_view text);
// `text` with every byte that is_printable() would refuse replaced by '?', cut between two
// characters to at most `max_bytes`.
std::string printable(std::string_view text, size_t max_bytes);

}  // namespace larder::protocol
