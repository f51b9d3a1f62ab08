#include <algorithm>
#include <functional>
#include <map>

#include "client/ctl/replay/step_parser.h"

namespace larder::replay {
namespace {

constexpr int64_t kMaxWaitMs = 600'000;

const std::vector<std::string> kStatsParts = {
    "capacity",    "free",   "open",           "published",  "cached",
    "quarantined", "pinned", "physical_bytes", "used_bytes", "slack_bytes"};
const std::vector<std::string> kPoolParts = [] {
  std::vector<std::string> parts = kStatsParts;
  for (const char* name : {"created", "page_bytes", "block_stride_bytes", "layer_stride_bytes"})
    parts.emplace_back(name);
  return parts;
}();

// What a result is good for in later steps.
enum class Kind : uint8_t { kOther, kBlocks, kState, kBytes };

struct Entry {
  bool has_pool;
  Kind kind;
  std::vector<std::string> parts;
  std::function<Operation(StepParser&)> parse;
};

RawBytes parse_raw_bytes(StepParser& p) {
  RawBytes raw;
  raw.layer = p.fields.int32("layer", 0);
  raw.region = static_cast<Region>(
      p.fields.choice("what", {"all", "k_data", "k_scale", "v_data", "v_scale", "row"}));
  const auto blocks = p.fields.find("blocks");
  const auto slots = p.fields.find("slots");
  if (blocks.has_value() == slots.has_value())
    p.fields.object().problem().say("blocks",
                                    blocks ? "stands beside \"slots\", expected one of them"
                                           : "is missing, and \"slots\" too: expected one of them");
  if (blocks) raw.where = p.blocks(*blocks);
  if (slots) raw.where = p.slots(*slots);
  return raw;
}

RawBytes parse_poke(StepParser& p) {
  RawBytes raw = parse_raw_bytes(p);
  const auto byte = p.fields.find("byte");
  const auto hex = p.fields.find("hex");
  if (byte.has_value() == hex.has_value())
    p.fields.object().problem().say("byte", byte ? "stands beside \"hex\", expected one of them"
                                                 : "is missing, and \"hex\" too: expected one");
  if (byte) raw.written = static_cast<uint8_t>(byte->integer(0, 255));
  if (hex) raw.written = p.hex(*hex);
  return raw;
}

MovePages parse_pages(StepParser& p, bool is_import) {
  MovePages move;
  move.is_import = is_import;
  move.layer = p.fields.int32("layer", 0);
  move.blocks = p.blocks(p.fields.need("blocks"));
  move.order = static_cast<PageOrder>(p.fields.choice("layout", {"NHD", "HND"}));
  move.v_scale_order =
      static_cast<VScaleOrder>(p.fields.choice("v_scale_order", {"linear", "swizzled"}));
  move.block_tokens = p.fields.int32("block_tokens", 0);
  if (is_import) move.hex = p.hex(p.fields.need("hex"));
  return move;
}

Publish parse_publish(StepParser& p) {
  Publish publish;
  publish.blocks = p.blocks(p.fields.need("blocks"));
  publish.tokens = p.tokens(p.fields.need("tokens"));
  publish.adapter = p.fields.text("adapter", "");
  publish.extra = p.extra();
  return publish;
}

Lookup parse_lookup(StepParser& p) {
  Lookup lookup;
  lookup.tokens = p.tokens(p.fields.need("tokens"));
  lookup.adapter = p.fields.text("adapter", "");
  lookup.extra = p.extra();
  lookup.hold = p.fields.boolean("hold", true);
  return lookup;
}

OpenSession parse_open_session(StepParser& p) {
  OpenSession open;
  open.tenant = p.fields.text("tenant", "default");
  open.is_process = p.fields.choice("mode", {"request", "process"}) == 1;
  if (p.scope != nullptr) p.scope->sessions.insert(p.step.session);
  return open;
}

Wait parse_wait(StepParser& p) {
  Wait wait;
  const Cursor until = p.fields.need("until");
  const PartNames* known = p.scope != nullptr ? &p.scope->results : nullptr;
  wait.until = parse_expectation(until, kStatsParts, known, p.step.references);
  if (wait.until.error) until.refuse("has \"error\": it is about the figures of stats");
  wait.limit_ms = p.fields.integer("ms", wait.limit_ms, 0, kMaxWaitMs);
  return wait;
}

Unserved parse_resize(StepParser& p) {
  (void)p.fields.need("num_blocks")
      .integer(std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max());
  return {p.step.op + " is not served by this build: pools keep the size they were made with"};
}

Unserved parse_quota(StepParser& p) {
  (void)p.fields.text("tenant", "default");
  (void)p.fields.integer("guaranteed_bytes", 0);
  (void)p.fields.integer("maximum_bytes", 0);
  return {"quota is not served by this build: tenants share the daemon's memory"};
}

Alloc parse_alloc(StepParser& p) {
  const Cursor n = p.fields.need("n");
  const auto group = p.fields.find("group");
  if (group) (void)group->text();  // pools have one group
  return {n.integer(std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max())};
}

const std::map<std::string, Entry>& table() {
  static const std::map<std::string, Entry> kTable = {
      {"open_session", {false, Kind::kOther, {}, parse_open_session}},
      {"kill_session", {false, Kind::kOther, {}, [](StepParser&) { return KillSession{}; }}},
      {"open_pool", {true, Kind::kOther, kPoolParts, parse_open_pool}},
      {"close_pool", {true, Kind::kOther, {}, [](StepParser&) { return ClosePool{}; }}},
      {"alloc", {true, Kind::kBlocks, {}, parse_alloc}},
      {"release",
       {true,
        Kind::kOther,
        {},
        [](StepParser& p) { return Release{p.blocks(p.fields.need("blocks"))}; }}},
      {"append", {true, Kind::kOther, {}, parse_append}},
      {"read", {true, Kind::kOther, {}, parse_read}},
      {"gather", {true, Kind::kOther, {"k", "v", "rows"}, parse_gather}},
      {"bytes", {true, Kind::kBytes, {}, parse_raw_bytes}},
      {"poke", {true, Kind::kOther, {}, parse_poke}},
      {"attend", {true, Kind::kState, {"out", "lse"}, parse_attend}},
      {"sparse_mla", {true, Kind::kState, {"out", "lse"}, parse_sparse_mla}},
      {"merge", {false, Kind::kState, {"out", "lse"}, parse_merge}},
      {"publish", {true, Kind::kBlocks, {"key", "block"}, parse_publish}},
      {"lookup", {true, Kind::kBlocks, {"hit_tokens", "blocks"}, parse_lookup}},
      {"copy",
       {true,
        Kind::kOther,
        {},
        [](StepParser& p) {
          return Copy{p.blocks(p.fields.need("from")), p.blocks(p.fields.need("to"))};
        }}},
      {"scrub",
       {true,
        Kind::kOther,
        {},
        [](StepParser& p) { return Scrub{p.blocks(p.fields.need("blocks"))}; }}},
      {"checksum",
       {true,
        Kind::kOther,
        {},
        [](StepParser& p) { return Checksum{p.blocks(p.fields.need("blocks"))}; }}},
      {"export", {true, Kind::kBytes, {}, [](StepParser& p) { return parse_pages(p, false); }}},
      {"import", {true, Kind::kOther, {}, [](StepParser& p) { return parse_pages(p, true); }}},
      {"sequence", {true, Kind::kOther, {}, parse_sequence}},
      {"grow", {true, Kind::kOther, {}, parse_resize}},
      {"shrink", {true, Kind::kOther, {}, parse_resize}},
      {"evict", {true, Kind::kOther, {}, parse_resize}},
      {"quota", {false, Kind::kOther, {}, parse_quota}},
      {"stats", {true, Kind::kOther, kStatsParts, [](StepParser&) { return Stats{}; }}},
      {"restart_daemon",
       {false,
        Kind::kOther,
        {},
        [](StepParser& p) {
          return RestartDaemon{p.fields.choice("how", {"kill", "term"}) == 0};
        }}},
      {"kill_executor", {false, Kind::kOther, {}, [](StepParser&) { return KillExecutor{}; }}},
      {"kill_keeper", {false, Kind::kOther, {}, [](StepParser&) { return KillKeeper{}; }}},
      {"wait", {true, Kind::kOther, {}, parse_wait}},
  };
  return kTable;
}

// A sequence step's result depends on its op.
Kind kind_of(const Step& step, Kind otherwise) {
  const auto* sequence = std::get_if<SequenceStep>(&step.operation);
  if (sequence == nullptr) return otherwise;
  if (sequence->op == SequenceOp::kAttend) return Kind::kState;
  return sequence->op == SequenceOp::kEnd ? Kind::kOther : Kind::kBlocks;
}

std::vector<std::string> parts_of(const Step& step, const std::vector<std::string>& otherwise) {
  const auto* sequence = std::get_if<SequenceStep>(&step.operation);
  if (sequence == nullptr) return otherwise;
  if (sequence->op == SequenceOp::kAttend) return {"out", "lse"};
  if (sequence->op == SequenceOp::kEnd) return {};
  if (sequence->op == SequenceOp::kBegin) return {"hit_tokens", "num_tokens", "blocks"};
  return {"num_tokens", "blocks"};
}

void name_result(const Cursor& as, const Step& step, Kind kind,
                 const std::vector<std::string>& parts, Scope& scope) {
  if (step.as.empty()) return as.expected("a name");
  if (scope.results.contains(step.as))
    return as.refuse("is " + shown(as.value()) + ", which an earlier step has taken");
  scope.results.emplace(step.as, parts);
  if (kind == Kind::kBlocks) scope.block_results.insert(step.as);
  if (kind == Kind::kState) scope.state_results.insert(step.as);
  if (kind == Kind::kBytes) scope.byte_results.insert(step.as);
  if (const auto* alloc = std::get_if<Alloc>(&step.operation))
    scope.num_blocks[step.as] = alloc->num_blocks;
}

// The pool's name is known to the session, or this step makes it known.
void check_pool(const Cursor& pool, const Step& step, Scope& scope) {
  if (step.op == "open_pool") {
    scope.pools.emplace(step.session, step.pool);
  } else if (!scope.pools.contains({step.session, step.pool})) {
    pool.refuse("is " + shown(pool.value()) + ", which no earlier step opens in session \"" +
                step.session + "\"");
  }
}

void check_session(Fields& fields, const Step& step, const Scope& scope) {
  const bool is_known = step.session == "main" || scope.sessions.contains(step.session);
  if (!is_known && step.op != "open_session")
    fields.need("session").refuse("is " + shown(json(step.session)) +
                                  ", which no earlier step opens");
}

}  // namespace

Step parse_step(const json& source, size_t number, const std::filesystem::path& folder,
                Scope* scope, Problem& problem) {
  Step step;
  step.number = number;
  step.source = source;
  Fields fields(Cursor(source, "", problem));
  const Cursor op = fields.need("do");
  step.op = op.text();
  const auto entry = table().find(step.op);
  if (entry == table().end()) {
    std::vector<std::string_view> names;
    for (const auto& [name, ignored] : table()) names.push_back(name);
    op.expected(one_of(names));
    return step;
  }
  step.session = fields.text("session", "main");
  (void)fields.text("comment", "");
  step.may_be_unsupported = fields.boolean("may_be_unsupported", false);
  if (scope != nullptr) check_session(fields, step, *scope);
  if (entry->second.has_pool) {
    const Cursor pool = fields.need("pool");
    step.pool = pool.text();
    if (scope != nullptr && !problem.found()) check_pool(pool, step, *scope);
  }
  StepParser parser{fields, step, folder, scope};
  step.operation = entry->second.parse(parser);
  const std::vector<std::string> parts = parts_of(step, entry->second.parts);
  if (const auto expect = fields.find("expect"))
    step.expect = parse_expectation(*expect, parts, scope != nullptr ? &scope->results : nullptr,
                                    step.references);
  if (const auto as = fields.find("as")) {
    step.as = as->text();
    if (scope != nullptr) name_result(*as, step, kind_of(step, entry->second.kind), parts, *scope);
  }
  fields.finish();
  return step;
}

}  // namespace larder::replay
