// larderctl replay and calibrate as programs: exit statuses, both kinds of session, what is
// printed, and that nothing is left behind.
#include <csignal>
#include <filesystem>
#include <fstream>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tests/support/node.h"

namespace larder::test {
namespace {

using nlohmann::json;

const std::string kPool =
    R"({"do": "open_pool", "pool": "p", "kv_heads": 1, "k_dim": 64, "v_dim": 64, "num_blocks": 4})";

struct Case {
  TemporaryFolder folder;

  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(folder.file(name), std::ios::binary) << text;
    return folder.file(name);
  }
  Output replay(const std::string& steps,
                const std::vector<std::string>& options = {"--embedded"}) const {
    std::vector<std::string> argv = {
        program("larderctl"), "replay",
        write("case.json", R"({"name": "a case", "steps": [)" + steps + "]}")};
    argv.insert(argv.end(), options.begin(), options.end());
    return run(argv);
  }
};

bool has(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

// A replay whose temporary folders are in `folder`.
std::vector<std::string> replay_within(const std::string& folder, const std::string& file) {
  return {"/usr/bin/env", "TMPDIR=" + folder, program("larderctl"), "replay", "--embedded", file};
}

bool somebody_runs_in(const std::string& folder) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored))
    if (has(read_file(entry.path() / "cmdline"), folder + "/larder-replay-")) return true;
  return false;
}

TEST_CASE("a file whose expectations hold") {
  const Output output = Case().replay(kPool + R"(,
      {"do": "stats", "pool": "p", "expect": {"free": {"equal": 4}, "open": {"equal": 0}}})");
  INFO(output.stderr_text);
  CHECK(output.exit_code == 0);
  CHECK(has(output.stdout_text, "a case"));
  CHECK(has(output.stdout_text, "ok         2 stats: free: equal: all 1 element"));
  CHECK(has(output.stdout_text, "2 ok, 0 FAIL, 0 skipped"));
}

TEST_CASE("an expectation that does not hold says what came") {
  const Output output = Case().replay(kPool + R"(,
      {"do": "stats", "pool": "p", "expect": {"free": {"equal": 3}}},
      {"do": "stats", "pool": "p", "expect": {"error": "BUSY"}},
      {"do": "alloc", "pool": "p", "n": 5})");
  CHECK(output.exit_code == 1);
  CHECK(has(output.stdout_text,
            "FAIL       2 stats: free: equal: 1 of 1 element differ, the first: "
            "element 0 is 4, expected 3"));
  CHECK(has(output.stdout_text, "FAIL       3 stats: error BUSY: came a result"));
  CHECK(has(output.stdout_text, "FAIL       4 alloc: RESOURCE_EXHAUSTED"));
  CHECK(has(output.stdout_text, "1 ok, 3 FAIL, 0 skipped"));
}

TEST_CASE("a file that cannot be used runs nothing") {
  const Case folder;
  const std::string good = folder.write("good.json", R"({"steps": [)" + kPool + "]}");
  const std::string bad =
      folder.write("bad.json", R"({"steps": [{"do": "alloc", "pool": "p", "n": 1}]})");
  const Output output = run({program("larderctl"), "replay", "--embedded", good, bad});
  CHECK(output.exit_code == 2);
  CHECK(output.stdout_text.empty());
  CHECK(has(output.stderr_text, "bad.json: step 1 (alloc): field \"pool\" is \"p\""));
  CHECK(run({program("larderctl"), "replay", "--embedded", "/nonexistent"}).exit_code == 2);
  CHECK(run({program("larderctl"), "replay"}).exit_code == 2);
}

TEST_CASE("options that exclude each other, and a GPU that is not there") {
  const Case folder;
  CHECK(folder.replay(kPool, {"--embedded", "--socket", "/nonexistent"}).exit_code == 2);
  const Output cuda = folder.replay(kPool, {"--embedded", "--memory", "cuda", "--device",
                                            "GPU-00000000-0000-0000-0000-000000000001"});
  CHECK(cuda.exit_code == 2);
  CHECK(has(cuda.stderr_text, "GPU-00000000-0000-0000-0000-000000000001"));
  CHECK(folder.replay(kPool, {"--embedded", "--device", "GPU-1"}).exit_code == 2);
  CHECK(folder.replay(kPool, {"--embedded", "--only", "2"}).exit_code == 2);
}

TEST_CASE("unsupported steps fail, or are skipped with all that needs them") {
  // A pool of fixed size does not grow.
  const std::string grow = R"({"do": "grow", "pool": "p", "num_blocks": 8)";
  const Output output = Case().replay(kPool + ", " + grow + "}, " + grow +
                                      R"(, "may_be_unsupported": true}, )" + grow +
                                      R"(, "expect": {"error": "UNSUPPORTED"}},
      {"do": "open_pool", "pool": "x", "kv_heads": 1, "k_dim": 64, "v_dim": 64, "num_blocks": 4,
       "format": "int4_per_token_head", "may_be_unsupported": true},
      {"do": "alloc", "pool": "x", "n": 1, "as": "b"},
      {"do": "release", "pool": "x", "blocks": "b"})");
  CHECK(output.exit_code == 1);
  CHECK(has(output.stdout_text, "FAIL       2 grow: UNSUPPORTED: "));
  CHECK(has(output.stdout_text, "skipped    3 grow: UNSUPPORTED: "));
  CHECK(has(output.stdout_text, "ok         4 grow: error UNSUPPORTED"));
  CHECK(has(output.stdout_text,
            "skipped    5 open_pool: UNSUPPORTED: format is \"int4_per_token_"
            "head\", this build serves \"bf16\""));
  CHECK(has(output.stdout_text, "skipped    7 release"));
  CHECK(has(output.stdout_text, "2 ok, 1 FAIL, 4 skipped"));
}

TEST_CASE("both kinds of session give the same bytes, and read each other's blocks") {
  const std::string append = R"("k": {"shape": [20,1,64], "normal": {"seed": 5, "std": 1}},
      "v": {"shape": [20,1,64], "normal": {"seed": 6, "std": 1}},
      "slots": {"blocks": "BLOCKS", "count": 20}})";
  const auto with = [&](std::string text, const std::string& blocks) {
    return text.replace(text.find("BLOCKS"), 6, blocks);
  };
  const std::string attend = R"("q": {"shape": [1,2,64], "normal": {"seed": 7, "std": 1}},
      "block_table": ["BLOCKS"], "seq_lens": [20])";
  const Output output = Case().replay(
      kPool + R"(, {"do": "open_session", "session": "c", "mode": "process"}, )" +
      R"({"do": "open_pool", "session": "c", "pool": "p", "kv_heads": 1, "k_dim": 64, "v_dim": 64,
          "num_blocks": 4},
      {"do": "alloc", "pool": "p", "n": 2, "as": "a"},
      {"do": "alloc", "session": "c", "pool": "p", "n": 2, "as": "b"},
      {"do": "append", "pool": "p", )" +
      with(append, "a") + R"(, {"do": "append", "session": "c", "pool": "p", )" +
      with(append, "b") + R"(,
      {"do": "bytes", "pool": "p", "blocks": "a", "as": "bytes"},
      {"do": "bytes", "pool": "p", "blocks": "b", "expect": {"same_as": "bytes"}},
      {"do": "bytes", "session": "c", "pool": "p", "blocks": "a", "expect": {"same_as": "bytes"}},
      {"do": "attend", "pool": "p", "as": "o", )" +
      with(attend, "a") + R"(}, {"do": "attend", "session": "c", "pool": "p", )" +
      with(attend, "b") + R"(, "expect": {"same_as": "o"}})");
  INFO(output.stdout_text, output.stderr_text);
  CHECK(output.exit_code == 0);
}

TEST_CASE("sessions that are killed, and daemons that are started again") {
  const Output output = Case().replay(kPool + R"(,
      {"do": "open_session", "session": "c", "mode": "process"},
      {"do": "open_pool", "session": "c", "pool": "p", "kv_heads": 1, "k_dim": 64, "v_dim": 64,
       "num_blocks": 4},
      {"do": "alloc", "session": "c", "pool": "p", "n": 3, "as": "b"},
      {"do": "kill_session", "session": "c"},
      {"do": "alloc", "session": "c", "pool": "p", "n": 1, "expect": {"error": "NOT_FOUND"}},
      {"do": "wait", "pool": "p", "until": {"free": {"equal": 4}}, "expect": {"at_most": 5000}},
      {"do": "wait", "pool": "p", "until": {"free": {"equal": 5}}, "ms": 20,
       "expect": {"error": "DEADLINE_EXCEEDED", "mentions": ["free"]}},
      {"do": "kill_executor"},
      {"do": "stats", "pool": "p", "expect": {"free": {"equal": 4}}},
      {"do": "kill_keeper"},
      {"do": "restart_daemon", "how": "kill", "expect": {"at_least": 0}},
      {"do": "alloc", "pool": "p", "n": 1, "as": "a"},
      {"do": "restart_daemon", "how": "term"},
      {"do": "release", "pool": "p", "blocks": "a"},
      {"do": "stats", "pool": "p", "expect": {"free": {"equal": 4}}})");
  INFO(output.stdout_text, output.stderr_text);
  CHECK(output.exit_code == 0);
}

TEST_CASE("a poke is seen by everybody") {
  const Output output = Case().replay(kPool + R"(,
      {"do": "alloc", "pool": "p", "n": 1, "as": "b"},
      {"do": "poke", "pool": "p", "blocks": [0, 1, 2, 3], "byte": 255},
      {"do": "bytes", "pool": "p", "blocks": [3], "expect": {"equal": 255}, "as": "before"},
      {"do": "poke", "pool": "p", "slots": [["b", 0, 2]], "what": "k_scale", "hex": "01020304"},
      {"do": "bytes", "pool": "p", "slots": [["b", 0, 2]], "what": "k_scale",
       "expect": {"equal": "01020304"}},
      {"do": "poke", "pool": "p", "blocks": [4], "byte": 0,
       "expect": {"error": "INVALID_ARGUMENT", "mentions": ["4"]}},
      {"do": "poke", "pool": "p", "blocks": "b", "hex": "00",
       "expect": {"error": "INVALID_ARGUMENT", "mentions": ["hex has 1 bytes"]}},
      {"do": "poke", "pool": "p", "blocks": [3], "hex": {"of": "before"}})");
  INFO(output.stdout_text, output.stderr_text);
  CHECK(output.exit_code == 0);
}

TEST_CASE("json has every result in full") {
  const Output output = Case().replay(kPool + R"(,
      {"do": "alloc", "pool": "p", "n": 2, "as": "b"},
      {"do": "read", "pool": "p", "what": "k", "slots": [["b", 1, 15], -1],
       "expect": {"near": 0.5, "atol": 0.75}})",
                                      {"--embedded", "--format", "json"});
  CHECK(output.exit_code == 1);
  const json object = json::parse(output.stdout_text);
  CHECK(object["name"] == "a case");
  CHECK(object["ok"] == 2);
  CHECK(object["failed"] == 1);
  REQUIRE(object["steps"].size() == 3);
  CHECK(object["steps"][0]["result"]["free"] == 4);
  CHECK(object["steps"][1]["result"].size() == 2);
  CHECK(object["steps"][1]["as"] == "b");
  const json& read = object["steps"][2];
  CHECK(read["verdict"] == "FAIL");
  REQUIRE(read["result"].size() == 2);
  CHECK(read["result"][0][0][63] == 0);
  CHECK(read["result"][1][0][0] == "NaN");
  CHECK(read["checks"][0]["holds"] == false);
  CHECK(read["checks"][0]["largest_error"] == "NaN");
  CHECK(read["checks"][0]["at"] == 64);
}

TEST_CASE("one step alone is reported") {
  const Output output = Case().replay(kPool + R"(,
      {"do": "stats", "pool": "p", "expect": {"free": {"equal": 3}}},
      {"do": "stats", "pool": "p", "expect": {"free": {"equal": 4}}},
      {"do": "stats", "pool": "p", "expect": {"free": {"equal": 3}}})",
                                      {"--embedded", "--only", "3"});
  CHECK(output.exit_code == 0);
  CHECK(has(output.stdout_text, "1 ok, 0 FAIL, 0 skipped"));
}

TEST_CASE("a daemon that is there already is used, and keeps none of the file's pools") {
  const Node node;
  const Case folder;
  const std::string steps = kPool + R"(,
      {"do": "alloc", "pool": "p", "n": 1, "as": "b"},
      {"do": "bytes", "pool": "p", "blocks": "b", "expect": {"equal": 0}},
      {"do": "poke", "pool": "p", "blocks": "b", "byte": 0,
       "expect": {"error": "UNSUPPORTED", "mentions": ["--embedded"]}},
      {"do": "restart_daemon", "expect": {"error": "UNSUPPORTED", "mentions": ["--embedded"]}})";
  const Output output = folder.replay(steps, {"--socket", node.socket()});
  INFO(output.stdout_text, output.stderr_text);
  CHECK(output.exit_code == 0);
  CHECK(node.ctl({"pools"}).empty());
  CHECK(folder.replay(kPool, {"--socket", "/nonexistent/larderd.sock"}).exit_code == 1);
}

TEST_CASE("an embedded daemon is gone afterwards, also when the replay is interrupted") {
  const Case folder;
  const std::string within = folder.folder.file("tmp");
  std::filesystem::create_directory(within);
  const std::string good = folder.write("good.json", R"({"steps": [)" + kPool + "]}");
  CHECK(run(replay_within(within, good)).exit_code == 0);
  CHECK(std::filesystem::is_empty(within));
  const std::string file = folder.write("wait.json", R"({"steps": [)" + kPool + R"(,
      {"do": "wait", "pool": "p", "until": {"free": {"equal": 5}}, "ms": 600000}]})");
  for (const int signal : {SIGTERM, SIGINT}) {
    const std::string log = folder.folder.file("log" + std::to_string(signal));
    Process replay(replay_within(within, file), log);
    REQUIRE(eventually([&] { return has(read_file(log), "ok "); }, std::chrono::seconds(60)));
    CHECK(somebody_runs_in(within));
    replay.signal(signal);
    CHECK(replay.wait_exit(std::chrono::seconds(20)) == 128 + signal);
    CHECK(std::filesystem::is_empty(within));
    CHECK(eventually([&] { return !somebody_runs_in(within); }));
  }
}

TEST_CASE("tenants of the file exist on an embedded daemon, and do not see each other's pools") {
  const Output output = Case().replay(kPool + R"(,
      {"do": "open_session", "session": "b", "tenant": "other \"team\""},
      {"do": "open_pool", "session": "b", "pool": "p", "kv_heads": 1, "k_dim": 64, "v_dim": 64,
       "num_blocks": 8, "expect": {"created": {"equal": 1}, "capacity": {"equal": 8}}})");
  INFO(output.stdout_text, output.stderr_text);
  CHECK(output.exit_code == 0);
}

TEST_CASE("calibrate says what is wrong with a dump") {
  const Case folder;
  const std::string dump = folder.write("dump.safetensors", "x");
  const Output output =
      run({program("larderctl"), "calibrate", dump, "-o", folder.folder.file("out")});
  CHECK(output.exit_code == 2);
  CHECK(has(output.stderr_text, "INVALID_ARGUMENT"));
  CHECK(!std::filesystem::exists(folder.folder.file("out")));
}

}  // namespace
}  // namespace larder::test
