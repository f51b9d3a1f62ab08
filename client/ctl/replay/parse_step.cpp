#include <algorithm>
#include <functional>
#include <map>

#include "client/ctl/replay/step_parser.h"

namespace larder::replay {
namespace {

constexpr int64_t kMaxWaitMs = 600'000;

using Names = std::vector<std::string>;

Names joined(Names names, const Names& more) {
  names.insert(names.end(), more.begin(), more.end());
  return names;
}

const Names kFigures = {"capacity",
                        "free",
                        "open",
                        "published",
                        "cached",
                        "quarantined",
                        "pinned",
                        "evictable",
                        "max_blocks",
                        "physical_bytes",
                        "used_bytes",
                        "slack_bytes",
                        "leaving_bytes",
                        "quarantined_pidfd",
                        "quarantined_mps",
                        "quarantined_unprovable",
                        "quarantined_executor_only"};
const Names kTenantFigures = {"tenant_guaranteed_bytes", "tenant_maximum_bytes",
                              "tenant_used_bytes", "tenant_evictable_bytes",
                              "tenant_leaving_bytes"};
const Names kPoolParts = joined(
    kFigures, {"created", "page_bytes", "block_stride_bytes", "layer_stride_bytes", "unit_tokens"});
const Names kResizeParts = {"blocks_before", "blocks_after", "bytes_before", "bytes_after"};

Names figures_of(const Step& step, const Stats& stats) {
  Names parts = step.pool.empty() ? Names() : kFigures;
  return stats.tenant.empty() ? parts : joined(std::move(parts), kTenantFigures);
}

// What a result is good for in later steps.
enum class Kind : uint8_t { kOther, kBlocks, kState, kBytes };

// What of a pool a step names.
enum class About : uint8_t { kNone, kPool, kGroup, kGroupOrTenant };

struct Entry {
  About about;
  Kind kind;
  Names parts;
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

// {"GROUP": blocks, ...}
std::map<std::string, BlockList> parse_group_blocks(StepParser& p, const Cursor& cursor) {
  std::map<std::string, BlockList> lists;
  Fields inner(cursor);
  for (const auto& [name, ignored] : cursor.value().items()) {
    if (p.scope != nullptr) p.check_group(inner.need(name), name);
    lists.emplace(name, p.blocks(inner.need(name)));
  }
  if (lists.empty()) cursor.refuse("names no group");
  return lists;
}

Publish parse_publish(StepParser& p) {
  Publish publish;
  const Cursor blocks = p.fields.need("blocks");
  if (!blocks.value().is_object()) publish.blocks = p.blocks(blocks);
  if (blocks.value().is_object()) publish.group_blocks = parse_group_blocks(p, blocks);
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

Stats parse_stats(StepParser& p) { return {p.fields.text("tenant", "")}; }

Wait parse_wait(StepParser& p) {
  Wait wait;
  wait.stats = parse_stats(p);
  const Cursor until = p.fields.need("until");
  const PartNames* known = p.scope != nullptr ? &p.scope->results : nullptr;
  wait.until = parse_expectation(until, figures_of(p.step, wait.stats), known, p.step.references);
  if (wait.until.error) until.refuse("has \"error\": it is about the figures of stats");
  wait.limit_ms = p.fields.integer("ms", wait.limit_ms, 0, kMaxWaitMs);
  return wait;
}

Quota parse_quota(StepParser& p) {
  return {p.fields.text("tenant", "default"), p.fields.integer("guaranteed_bytes", 0),
          p.fields.integer("maximum_bytes", 0)};
}

int64_t any_integer(const Cursor& cursor) {
  return cursor.integer(std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max());
}

Resize parse_resize(StepParser& p) { return {any_integer(p.fields.need("num_blocks"))}; }
Evict parse_evict(StepParser& p) { return {any_integer(p.fields.need("num_blocks"))}; }
Alloc parse_alloc(StepParser& p) { return {any_integer(p.fields.need("n"))}; }

const std::map<std::string, Entry>& table() {
  static const std::map<std::string, Entry> kTable = {
      {"open_session", {About::kNone, Kind::kOther, {}, parse_open_session}},
      {"kill_session", {About::kNone, Kind::kOther, {}, [](StepParser&) { return KillSession{}; }}},
      {"open_pool", {About::kPool, Kind::kOther, kPoolParts, parse_open_pool}},
      {"close_pool", {About::kPool, Kind::kOther, {}, [](StepParser&) { return ClosePool{}; }}},
      {"alloc", {About::kGroup, Kind::kBlocks, {}, parse_alloc}},
      {"release",
       {About::kGroup,
        Kind::kOther,
        {},
        [](StepParser& p) { return Release{p.blocks(p.fields.need("blocks"))}; }}},
      {"append", {About::kGroup, Kind::kOther, {}, parse_append}},
      {"read", {About::kGroup, Kind::kOther, {}, parse_read}},
      {"gather", {About::kGroup, Kind::kOther, {"k", "v", "rows"}, parse_gather}},
      {"bytes", {About::kGroup, Kind::kBytes, {}, parse_raw_bytes}},
      {"poke", {About::kGroup, Kind::kOther, {}, parse_poke}},
      {"attend", {About::kGroup, Kind::kState, {"out", "lse"}, parse_attend}},
      {"sparse_mla", {About::kGroup, Kind::kState, {"out", "lse"}, parse_sparse_mla}},
      {"merge", {About::kNone, Kind::kState, {"out", "lse"}, parse_merge}},
      {"publish", {About::kPool, Kind::kBlocks, {"key", "block"}, parse_publish}},
      {"lookup", {About::kPool, Kind::kBlocks, {"hit_tokens", "blocks"}, parse_lookup}},
      {"copy",
       {About::kGroup,
        Kind::kOther,
        {},
        [](StepParser& p) {
          return Copy{p.blocks(p.fields.need("from")), p.blocks(p.fields.need("to"))};
        }}},
      {"scrub",
       {About::kGroup,
        Kind::kOther,
        {},
        [](StepParser& p) { return Scrub{p.blocks(p.fields.need("blocks"))}; }}},
      {"checksum",
       {About::kGroup,
        Kind::kOther,
        {},
        [](StepParser& p) { return Checksum{p.blocks(p.fields.need("blocks"))}; }}},
      {"export",
       {About::kGroup, Kind::kBytes, {}, [](StepParser& p) { return parse_pages(p, false); }}},
      {"import",
       {About::kGroup, Kind::kOther, {}, [](StepParser& p) { return parse_pages(p, true); }}},
      {"sequence", {About::kPool, Kind::kOther, {}, parse_sequence}},
      {"grow", {About::kGroup, Kind::kOther, kResizeParts, parse_resize}},
      {"shrink", {About::kGroup, Kind::kOther, kResizeParts, parse_resize}},
      {"evict", {About::kPool, Kind::kOther, kResizeParts, parse_evict}},
      {"quota", {About::kNone, Kind::kOther, {}, parse_quota}},
      {"stats", {About::kGroupOrTenant, Kind::kOther, {}, parse_stats}},
      {"restart_daemon",
       {About::kNone,
        Kind::kOther,
        {},
        [](StepParser& p) {
          return RestartDaemon{p.fields.choice("how", {"kill", "term"}) == 0};
        }}},
      {"kill_executor",
       {About::kNone, Kind::kOther, {}, [](StepParser&) { return KillExecutor{}; }}},
      {"kill_keeper", {About::kNone, Kind::kOther, {}, [](StepParser&) { return KillKeeper{}; }}},
      {"wait", {About::kGroupOrTenant, Kind::kOther, {}, parse_wait}},
  };
  return kTable;
}

// The names of the pool's groups, where there are several.
const Names& groups_of(const Step& step, const Scope* scope) {
  static const Names kNone;
  if (scope == nullptr) return kNone;
  const auto found = scope->groups.find({step.session, step.pool});
  return found == scope->groups.end() ? kNone : found->second;
}

// A sequence step's result depends on its op.
Kind kind_of(const Step& step, Kind otherwise) {
  const auto* sequence = std::get_if<SequenceStep>(&step.operation);
  if (sequence == nullptr) return otherwise;
  if (sequence->op == SequenceOp::kAttend) return Kind::kState;
  return sequence->op == SequenceOp::kEnd ? Kind::kOther : Kind::kBlocks;
}

Names parts_of(const Step& step, const Names& otherwise, const Scope* scope) {
  if (const auto* stats = std::get_if<Stats>(&step.operation)) return figures_of(step, *stats);
  const Names& groups = groups_of(step, scope);
  if (!groups.empty() && std::holds_alternative<Publish>(step.operation))
    return joined({"key"}, groups);
  if (!groups.empty() && std::holds_alternative<Lookup>(step.operation))
    return joined({"hit_tokens"}, groups);
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

// A pool with one group has it under any name.
void parse_group_choice(Fields& fields, Step& step, const Scope* scope) {
  const Names& groups = groups_of(step, scope);
  if (!groups.empty()) step.group_name = groups.front();
  const auto group = fields.find("group");
  if (!group) return;
  if (group->value().is_string()) {
    step.group = group->text();
    if (groups.empty()) return;
    step.group_name = group->text();
    if (std::find(groups.begin(), groups.end(), step.group_name) == groups.end())
      group->expected(one_of({groups.begin(), groups.end()}));
    return;
  }
  const auto last = groups.empty() ? std::numeric_limits<int32_t>::max() : std::ssize(groups) - 1;
  const auto index = static_cast<int32_t>(group->integer(0, last));
  step.group = index;
  if (!groups.empty()) step.group_name = groups[static_cast<size_t>(index)];
}

// A pool that could not be opened stays what it was.
void note_groups(const Step& step, Scope& scope) {
  const auto* open = std::get_if<OpenPool>(&step.operation);
  if (open == nullptr || (step.expect && step.expect->error)) return;
  Names& names = scope.groups[{step.session, step.pool}];
  names.clear();
  if (open->options.more_groups.empty()) return;
  names.push_back(open->options.group_name);
  for (const GroupOptions& group : open->options.more_groups) names.push_back(group.group_name);
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
  if (source.is_object()) step.source.erase("expect");
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
  const About about = entry->second.about;
  const bool needs_pool = about != About::kNone &&
                          !(about == About::kGroupOrTenant && fields.find("tenant").has_value());
  if (const auto pool = about == About::kNone ? std::nullopt
                        : needs_pool          ? fields.need("pool")
                                              : fields.find("pool")) {
    step.pool = pool->text();
    if (scope != nullptr && !problem.found()) check_pool(*pool, step, *scope);
  }
  if (about == About::kGroup || (about == About::kGroupOrTenant && !step.pool.empty()))
    parse_group_choice(fields, step, scope);
  StepParser parser{fields, step, folder, scope};
  step.operation = entry->second.parse(parser);
  const Names parts = parts_of(step, entry->second.parts, scope);
  if (const auto expect = fields.find("expect"))
    step.expect = parse_expectation(*expect, parts, scope != nullptr ? &scope->results : nullptr,
                                    step.references);
  if (scope != nullptr) note_groups(step, *scope);
  if (const auto as = fields.find("as")) {
    step.as = as->text();
    if (scope != nullptr) name_result(*as, step, kind_of(step, entry->second.kind), parts, *scope);
  }
  fields.finish();
  return step;
}

}  // namespace larder::replay
