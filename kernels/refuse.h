// refuse(code, parts...): a Status whose sentence is the parts written one after another.
#pragma once

#include <sstream>

#include "larder/status.h"

namespace larder::kernels {

template <typename... Parts>
Status refuse(ErrorCode code, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return {code, text.str()};
}

}  // namespace larder::kernels
