// The parser of replay files: what it takes, and that every mistake is named by step and field
// before anything runs.
#include <string>

#include <doctest/doctest.h>

#include "client/ctl/replay/parse.h"

namespace larder::replay {
namespace {

const std::string kPool =
    R"({"do": "open_pool", "pool": "p", "kv_heads": 1, "k_dim": 64, "v_dim": 64, "num_blocks": 4})";
const std::string kAlloc = R"({"do": "alloc", "pool": "p", "n": 3, "as": "b"})";

std::string steps(const std::string& more) {
  return R"({"steps": [)" + kPool + ", " + kAlloc + (more.empty() ? "" : ", " + more) + "]}";
}

ReplayFile parse(const std::string& text) {
  auto file = parse_replay(text, "folder/case.json");
  REQUIRE_MESSAGE(file.ok(), file.status().message());
  return std::move(*file);
}

// The sentence without the file's name.
std::string refusal(const std::string& text) {
  const auto file = parse_replay(text, "case.json");
  REQUIRE(!file.ok());
  CHECK(file.status().code() == ErrorCode::kInvalidArgument);
  const std::string& message = file.status().message();
  REQUIRE(message.starts_with("case.json: "));
  return message.substr(11);
}
// The sentence about step 3, which follows a pool "p" and three blocks "b".
std::string step_refusal(const std::string& step) {
  const std::string text = refusal(steps(step));
  REQUIRE_MESSAGE(text.starts_with("step 3 ("), text);
  return text.substr(text.find("): ") + 3);
}

bool has(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

TEST_CASE("the example of the format's description") {
  const ReplayFile file = parse(R"({"name": "padding rows change no byte", "steps": [
    {"do": "open_pool", "pool": "p", "layers": 1, "kv_heads": 1, "k_dim": 64, "v_dim": 64,
     "block_tokens": 16, "num_blocks": 4, "format": "nvfp4"},
    {"do": "alloc", "pool": "p", "n": 3, "as": "b"},
    {"do": "bytes", "pool": "p", "blocks": "b", "as": "before"},
    {"do": "append", "pool": "p", "k": {"shape": [8,1,64], "fill": "NaN"},
     "v": {"shape": [8,1,64], "fill": "NaN"}, "slots": [-1,-1,-1,-1,-1,-1,-1,-1]},
    {"do": "bytes", "pool": "p", "blocks": "b", "expect": {"same_as": "before"}}]})");
  CHECK(file.name == "padding rows change no byte");
  REQUIRE(file.steps.size() == 5);
  const auto& pool = std::get<OpenPool>(file.steps[0].operation);
  CHECK(pool.options.geometry ==
        AttentionGeometry{1, 1, 16, 64, 64, KvFormat::kNvfp4, KvFormat::kNvfp4});
  CHECK(pool.options.num_blocks == 4);
  CHECK(pool.options.model == "replay");
  CHECK(file.steps[4].expect->same_as == "before");
  CHECK(file.steps[4].references == std::vector<std::string>{"b", "before"});
}

TEST_CASE("defaults of a pool and of attention") {
  const ReplayFile file = parse(steps(
      R"({"do": "attend", "pool": "p", "q": {"shape": [2,1,64], "fill": 0},
          "block_table": ["b", [["b", 0], 7]], "seq_lens": [3, 4]})"));
  const auto& pool = std::get<OpenPool>(file.steps[0].operation);
  CHECK(pool.options.geometry ==
        AttentionGeometry{1, 1, 16, 64, 64, KvFormat::kNvfp4, KvFormat::kNvfp4});
  CHECK(pool.options.max_blocks == 0);
  CHECK(pool.options.window_tokens == -1);
  const auto& attend = std::get<Attend>(file.steps[2].operation);
  CHECK(attend.q_lens == std::vector<int32_t>{1, 1});
  CHECK(attend.fields.causal);
  CHECK(attend.fields.out_dtype == Dtype::kFp32);
  CHECK(attend.table.block_table[0][0].result == "b");
  CHECK(attend.table.block_table[1][0].index == 0);
  CHECK(attend.table.block_table[1][1].id == 7);
}

TEST_CASE("options of attention that say what a batch shares and what a rank holds") {
  const std::string begin = R"({"do": "attend", "pool": "p", "q": {"shape": [1,1,64], "fill": 0},
          "block_table": ["b"], "seq_lens": [3], )";
  const auto fields = [&](const std::string& more) {
    const ReplayFile file = parse(steps(begin + more + "}"));
    return std::get<Attend>(file.steps[2].operation).fields;
  };
  CHECK_FALSE(fields(R"("splits": 0)").deterministic);
  CHECK(fields(R"("splits": 0)").shared_prefix_tokens == 0);
  CHECK(fields(R"("splits": 0)").shard == ContextShard());
  CHECK(fields(R"("deterministic": true)").deterministic);
  CHECK(fields(R"("shared_prefix_tokens": -1)").shared_prefix_tokens == kFindSharedPrefix);
  CHECK(fields(R"("shard": {"ranks": 3, "rank": 2})").shard == ContextShard{3, 2, 1});
  CHECK(fields(R"("shard": {"ranks": 3, "rank": 0, "interleave": 16})").shard ==
        ContextShard{3, 0, 16});
  CHECK(has(step_refusal(begin + R"("shard": {"ranks": 3}})"), "shard.rank"));
  CHECK(has(step_refusal(begin + R"("shard": {"ranks": 3, "rank": 1, "size": 2}})"), "size"));
  CHECK(has(step_refusal(begin + R"("shard": 3})"), "shard"));
}

TEST_CASE("a mask is packed bit by bit, each sequence from a byte of its own") {
  const ReplayFile file = parse(steps(
      R"({"do": "attend", "pool": "p", "q": {"shape": [3,1,64], "fill": 0}, "q_lens": [2, 1],
          "block_table": ["b", "b"], "seq_lens": [5, 3],
          "mask": [[[1,0,0,0,0],[0,0,0,1,1]], [0,1,0]]})"));
  const auto& attend = std::get<Attend>(file.steps[2].operation);
  CHECK(attend.mask == std::vector<uint8_t>{0b00000001, 0b00000011, 0b00000010});
  CHECK(attend.mask_offsets == std::vector<int64_t>{0, 2});
}

TEST_CASE("names that this build does not serve are for the step to refuse") {
  const ReplayFile file = parse(R"({"steps": [{"do": "open_pool", "pool": "p", "kv_heads": 1,
      "k_dim": 64, "v_dim": 64, "num_blocks": 4, "format": "turboquant_4bit_nc"}]})");
  const auto& pool = std::get<OpenPool>(file.steps[0].operation);
  CHECK(has(pool.unsupported, "format is \"turboquant_4bit_nc\""));
  CHECK(has(pool.unsupported, "\"nvfp4\""));
}

const std::string kGroups = R"({"do": "open_pool", "pool": "g", "groups": [
    {"name": "full", "kv_heads": 1, "k_dim": 64, "v_dim": 64, "num_blocks": 4, "max_blocks": 8},
    {"name": "state", "kind": "opaque", "block_bytes": 64, "num_blocks": 4}]})";

std::string group_steps(const std::string& more) {
  return R"({"steps": [)" + kGroups + ", " + more + "]}";
}

TEST_CASE("groups are named by their names or numbers, the first where none is") {
  const ReplayFile file = parse(group_steps(
      R"({"do": "alloc", "pool": "g", "n": 2, "as": "b"},
         {"do": "alloc", "pool": "g", "n": 1, "group": 1, "as": "s"},
         {"do": "release", "pool": "g", "blocks": "s", "group": "state"},
         {"do": "publish", "pool": "g", "blocks": {"full": "b", "state": [-1, ["s", 0]]},
          "tokens": [1], "as": "p", "expect": {"full": {"same_as": "b"}, "key": {"unique": true}}},
         {"do": "lookup", "pool": "g", "tokens": [1], "expect": {"state": {"equal": [3]}}})"));
  const auto& options = std::get<OpenPool>(file.steps[0].operation).options;
  CHECK(options.group_name == "full");
  CHECK(options.max_blocks == 8);
  REQUIRE(options.more_groups.size() == 1);
  CHECK(options.more_groups[0].group_name == "state");
  CHECK(options.more_groups[0].opaque_block_bytes == 64);
  CHECK(file.steps[1].group_name == "full");
  CHECK(file.steps[2].group_name == "state");
  CHECK(file.steps[3].group_name == "state");
  const auto& publish = std::get<Publish>(file.steps[4].operation);
  CHECK(publish.blocks.empty());
  CHECK(publish.group_blocks.at("full")[0].result == "b");
  CHECK(publish.group_blocks.at("state")[0].id == -1);
  // What a session in another process is sent needs no expectation.
  CHECK(!file.steps[4].source.contains("expect"));
}

TEST_CASE("a group that the pool does not have is refused, one of a plain pool is its only one") {
  const auto refused = [](const std::string& step) { return refusal(group_steps(step)); };
  CHECK(refused(R"({"do": "alloc", "pool": "g", "n": 1, "group": "window"})") ==
        "step 2 (alloc): field \"group\" is \"window\", expected \"full\" or \"state\"");
  CHECK(has(refused(R"({"do": "alloc", "pool": "g", "n": 1, "group": 2})"),
            "field \"group\" is 2, expected a whole number from 0 to 1"));
  CHECK(has(refused(R"({"do": "publish", "pool": "g", "tokens": [1], "blocks": {"window": [1]}})"),
            "field \"blocks.window\" is no group of the pool, expected \"full\" or \"state\""));
  CHECK(has(refused(R"({"do": "publish", "pool": "g", "tokens": [1], "blocks": {}})"),
            "field \"blocks\" names no group"));
  CHECK(has(refused(R"({"do": "lookup", "pool": "g", "tokens": [1],
                        "expect": {"blocks": {"equal": 1}}})"),
            "field \"expect.blocks\" is unknown"));
  CHECK(has(step_refusal(
                R"({"do": "publish", "pool": "p", "tokens": [1], "blocks": {"attention": "b"}})"),
            "names a group, but the pool has one"));
  CHECK(parse(steps(R"({"do": "alloc", "pool": "p", "n": 1, "group": "any"})"))
            .steps[2]
            .group_name.empty());
  const auto named = [](const std::string& name) {
    return refusal(R"({"steps": [{"do": "open_pool", "pool": "g", "groups": [
        {"name": "a", "kind": "opaque", "block_bytes": 64, "num_blocks": 4},
        {"name": ")" +
                   name + R"(", "kind": "opaque", "block_bytes": 64, "num_blocks": 4}]}]})");
  };
  CHECK(has(named("a"), "field \"groups[1].name\" is \"a\", as of another group"));
  CHECK(has(named("hit_tokens"), "a word that results and expectations have"));
}

TEST_CASE("figures of a tenant need no pool") {
  const ReplayFile file = parse(R"({"steps": [
      {"do": "stats", "tenant": "t", "expect": {"tenant_used_bytes": {"equal": 0}}},
      {"do": "wait", "tenant": "t", "until": {"tenant_leaving_bytes": {"equal": 0}}},
      {"do": "quota", "tenant": "t", "guaranteed_bytes": 5, "maximum_bytes": 7}]})");
  CHECK(std::get<Stats>(file.steps[0].operation).tenant == "t");
  CHECK(std::get<Wait>(file.steps[1].operation).stats.tenant == "t");
  const auto& quota = std::get<Quota>(file.steps[2].operation);
  CHECK(quota.guaranteed_bytes == 5);
  CHECK(quota.maximum_bytes == 7);
  CHECK(has(refusal(R"({"steps": [{"do": "stats"}]})"), "field \"pool\" is missing"));
  CHECK(has(refusal(R"({"steps": [{"do": "stats", "tenant": "t", "group": 0}]})"),
            "field \"group\" is unknown"));
  CHECK(has(refusal(R"({"steps": [{"do": "stats", "tenant": "t",
                       "expect": {"free": {"equal": 0}}}]})"),
            "field \"expect.free\" is unknown"));
  CHECK(has(step_refusal(R"({"do": "stats", "pool": "p", "expect": {"tenant_used_bytes":
                             {"equal": 0}}})"),
            "field \"expect.tenant_used_bytes\" is unknown"));
}

TEST_CASE("what is no replay file at all") {
  CHECK(has(refusal(""), "is not JSON"));
  CHECK(has(refusal("{\"steps\": ["), "is not JSON"));
  CHECK(has(refusal("\xff\xfe"), "is not JSON"));
  CHECK(has(refusal("[]"), "is a list of 0, expected an object"));
  CHECK(refusal("{}") == "field \"steps\" is missing");
  CHECK(refusal(R"({"steps": []})") == "field \"steps\" is empty, expected one step or more");
  CHECK(has(refusal(R"({"steps": [1]})"), "step 1: is 1, expected an object"));
  CHECK(has(refusal(R"({"version": 2, "steps": []})"), "field \"version\" is 2"));
  CHECK(has(refusal(R"({"name": 1, "steps": []})"), "field \"name\" is 1, expected a text"));
  CHECK(has(refusal(R"({"steps": [{}], "more": 1})"), "field \"more\" is unknown"));
  CHECK(has(refusal(R"({"steps": [], "steps": []})"), "has the key \"steps\" twice"));
  CHECK(has(refusal(std::string(100'000, '[')), "is nested deeper than 24 levels"));
  CHECK(has(refusal(std::string(100'000, '[') + std::string(100'000, ']')), "is nested deeper"));
}

TEST_CASE("a mistake is named by its step and field") {
  CHECK(has(step_refusal(R"({"do": "apend", "pool": "p"})"), "field \"do\" is \"apend\""));
  CHECK(step_refusal(R"({"do": "release", "pool": "p"})") == "field \"blocks\" is missing");
  CHECK(has(step_refusal(R"({"do": "release", "pool": "p", "blocks": "b", "block": 1})"),
            "field \"block\" is unknown"));
  CHECK(step_refusal(R"({"do": "alloc", "pool": "p", "n": "3"})") ==
        "field \"n\" is \"3\", expected a whole number of 64 bits");
  CHECK(step_refusal(R"({"do": "alloc", "pool": "q", "n": 3})") ==
        "field \"pool\" is \"q\", which no earlier step opens in session \"main\"");
  CHECK(step_refusal(R"({"do": "alloc", "pool": "p", "n": 3, "session": "s"})") ==
        "field \"session\" is \"s\", which no earlier step opens");
  CHECK(step_refusal(R"({"do": "alloc", "pool": "p", "n": 3, "as": "b"})") ==
        "field \"as\" is \"b\", which an earlier step has taken");
  CHECK(step_refusal(R"({"do": "release", "pool": "p", "blocks": "c"})") ==
        "field \"blocks\" is \"c\", which no earlier step names with \"as\"");
  CHECK(step_refusal(R"({"do": "release", "pool": "p", "blocks": ["b", 3]})") ==
        "field \"blocks[1]\" is 3, \"b\" has 3 blocks");
  CHECK(step_refusal(R"({"do": "read", "pool": "p", "what": "q", "slots": [0]})") ==
        "field \"what\" is \"q\", expected \"k\", \"v\", \"latent\" or \"rope\"");
  CHECK(step_refusal(R"({"do": "read", "pool": "p", "what": "k", "slots": [["b", 0]]})") ==
        "field \"slots[0]\" is a list of 2, expected a slot or [\"NAME\", INDEX, OFFSET]");
  CHECK(step_refusal(
            R"({"do": "append", "pool": "p", "k": {"shape": [1,1], "fill": 0},
                "v": {"shape": [1,1,64], "fill": 0}, "slots": [0]})") ==
        "field \"k.shape\" has 2 sizes, expected 3");
  CHECK(step_refusal(R"({"do": "poke", "pool": "p", "blocks": "b", "byte": 256})") ==
        "field \"byte\" is 256, expected a whole number from 0 to 255");
  CHECK(has(step_refusal(R"({"do": "bytes", "pool": "p"})"), "field \"blocks\" is missing"));
  CHECK(has(step_refusal(R"({"do": "merge", "states": ["b"]})"),
            "is \"b\", a result without the parts \"out\" and \"lse\""));
  CHECK(has(step_refusal(R"({"do": "sequence", "pool": "p", "op": "end", "name": "s"})"),
            "field \"name\" is \"s\", which no earlier step begins"));
  CHECK(has(step_refusal(R"({"do": "attend", "pool": "p", "q": {"shape": [1,1,64], "fill": 0},
                             "block_table": ["b"], "seq_lens": [2], "mask": [[1]]})"),
            "field \"mask[0]\" has 1 numbers, expected 1 rows of 2"));
}

TEST_CASE("a mistake in an expectation is found before anything runs") {
  const auto expect = [](const std::string& step, const std::string& expectation) {
    return step_refusal(step.substr(0, step.size() - 1) + R"(, "expect": )" + expectation + "}");
  };
  const std::string stats = R"({"do": "stats", "pool": "p"})";
  const std::string bytes = R"({"do": "bytes", "pool": "p", "blocks": "b"})";
  CHECK(has(expect(bytes, "{}"), "field \"expect\" is empty"));
  CHECK(has(expect(bytes, R"({"eqal": 1})"), "field \"expect.eqal\" is unknown"));
  for (const std::string key : {"atol", "rtol", "gpu_atol"})
    CHECK(has(expect(bytes, "{\"" + key + "\": 1}"),
              "field \"expect." + key + "\" needs \"near\" beside it"));
  CHECK(has(expect(bytes, R"({"near": 1, "atol": -1})"), "is -1, expected a number"));
  CHECK(has(expect(bytes, R"({"error": "NO_SUCH"})"), "is \"NO_SUCH\", expected"));
  CHECK(has(expect(bytes, R"({"error": "BUSY", "equal": 1})"), "has \"error\" and checks"));
  CHECK(has(expect(bytes, R"({"mentions": ["x"]})"), "needs \"error\" beside it"));
  CHECK(has(expect(bytes, R"({"same_as": "x"})"), "no earlier step names"));
  CHECK(has(expect(bytes, R"({"unique": false})"), "is false, expected true"));
  CHECK(has(expect(bytes, R"({"equal": "0g"})"), "hexadecimal"));
  CHECK(has(expect(stats, R"({"equal": 1})"), "checks the whole result, but it has the parts"));
  CHECK(has(expect(stats, R"({"equal": 1, "differs_from": "b"})"), "checks the whole result"));
  CHECK(has(expect(stats, R"({"fre": {"equal": 1}})"), "field \"expect.fre\" is unknown"));
  CHECK(has(expect(stats, R"({"free": {"equal": {"of": "b", "part": "x"}}})"),
            "names a part of \"b\", which has none"));
}

TEST_CASE("a result with parts is named with its part") {
  const std::string lookup = R"({"do": "lookup", "pool": "p", "tokens": [1], "as": "hit"})";
  const auto with = [&](const std::string& expect) {
    return steps(lookup + R"(, {"do": "wait", "pool": "p", "until": {"free": {"equal": )" + expect +
                 "}}}");
  };
  CHECK(has(refusal(with(R"({"of": "hit"})")), "needs a \"part\" of \"hit\""));
  CHECK(parse(with(R"({"of": "hit", "part": "hit_tokens"})")).steps.size() == 4);
}

TEST_CASE("limits of a file") {
  CHECK(has(refusal(std::string(static_cast<size_t>(kMaxFileBytes) + 1, ' ')), "at most"));
  std::string many = kPool;
  for (size_t i = 0; i < kMaxSteps; ++i) many += R"(, {"do": "kill_keeper"})";
  CHECK(has(refusal(R"({"steps": [)" + many + "]}"), "at most 10000 are allowed"));
}

TEST_CASE("a file that cannot be read") {
  CHECK(read_replay("/nonexistent/case.json").status().code() == ErrorCode::kNotFound);
  CHECK(read_replay("/").status().code() == ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace larder::replay
