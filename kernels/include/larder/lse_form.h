// How log-sum-exp values are written at an API's boundary.
//
// Larder's own form: natural log, without the sink, [tokens, heads]. Libraries differ (FlashInfer:
// base 2, the sink included; vLLM's merge: [heads, tokens]), so each is an option.
#pragma once

namespace larder {

struct LseForm {
  bool base2 = false;          // log2 instead of ln
  bool includes_sink = false;  // the sink's exp is in the sum; no difference without sinks
  bool heads_first = false;    // [heads, tokens] instead of [tokens, heads]
  bool operator==(const LseForm&) const = default;
};

}  // namespace larder
