// larderd is killed or told to end, another starts: everybody holds exactly what they held.
#include "tests/e2e/survival.h"

#include <set>

namespace larder::test {
namespace {

using namespace std::chrono_literals;

// Short enough that a SIGTERM with clients there does not take long.
constexpr const char* kQuickEnd = "shutdown_grace_ms = 100\nmemory_bytes = 268435456\n";

PoolOptions growing_pool(const std::string& name, Execution execution) {
  PoolOptions options = small_pool(name, execution, KvFormat::kBf16, 512);
  options.max_blocks = 2048;
  options.segment_bytes = int64_t{4} << 20;  // 512 blocks of 8 KiB
  return options;
}

PoolOptions pool_of_two_groups(const std::string& name) {
  PoolOptions options = small_pool(name, Execution::kInProcess, KvFormat::kFp8E4m3, 16);
  GroupOptions state;
  state.group_name = "state";
  state.opaque_block_bytes = 4096;
  state.geometry.block_tokens = 16;
  state.num_blocks = 8;
  options.more_groups = {state};
  return options;
}

// A client with everything that a client can hold.
struct Holder {
  Holder(const Node& node, const std::string& name, Execution execution)
      : client(node.connect({.name = name})),
        fixed(must(client.open_pool(small_pool("fixed", execution, KvFormat::kNvfp4, 64)))),
        growing(must(client.open_pool(growing_pool("growing", execution)))),
        opened(must(fixed.allocate(5))),
        in_growing(must(growing.allocate(600))),
        sequence(fixed.begin_sequence()) {
    const auto seed = static_cast<uint32_t>(client.session_id());
    fill_blocks(fixed, opened, seed);
    fill_blocks(growing, in_growing, seed + 100);
    must(sequence.extend(40));
    const std::vector<BlockHandle> of_text(sequence.blocks().begin(), sequence.blocks().end());
    fill_blocks(fixed, of_text, seed + 200);
    const auto text = text_tokens(40, static_cast<int32_t>(seed) * 1000);
    must(sequence.publish(text));
    REQUIRE(must(fixed.lookup(text, true)).hit_tokens == 32);  // two more holds
    released = must(fixed.allocate(1))[0];
    must(fixed.release(std::span(&released, 1)));
    remember();
  }
  void remember() { before = sums(); }
  std::vector<uint64_t> sums() {
    std::vector<uint64_t> all = checksums(fixed, opened);
    for (const uint64_t sum : checksums(growing, in_growing)) all.push_back(sum);
    for (const uint64_t sum : must(fixed.checksum(sequence.block_ids()))) all.push_back(sum);
    return all;
  }

  Client client;
  Pool fixed;
  Pool growing;
  std::vector<BlockHandle> opened;
  std::vector<BlockHandle> in_growing;
  Sequence sequence;
  BlockHandle released;
  std::vector<uint64_t> before;
};

void await_all_back(const Node& node, size_t count) {
  const bool back = eventually(
      [&] {
        const auto sessions = sessions_of(node);
        size_t present = 0;
        for (const auto& session : sessions)
          present += session["absent"] == false && session["closing"] == false;
        return present == count;
      },
      20s);
  if (!back) MESSAGE(node.ctl({"sessions"}).dump(1), node.log());
  REQUIRE(back);
}

TEST_CASE("after SIGKILL and SIGTERM of larderd every hold, block and byte is as it was") {
  const ConfigFile config(kQuickEnd);
  Node node(config.options());
  Holder in_process(node, "in process", Execution::kInProcess);
  Holder on_request(node, "on request", Execution::kOnRequest);
  Client client = node.connect({.name = "two groups"});
  Pool units = must(client.open_pool(pool_of_two_groups("units")));
  Pool state = must(units.group(1));
  const auto of_units = must(units.allocate(3));
  const auto of_state = must(state.allocate(2));
  fill_blocks(units, of_units, 7);
  fill_blocks(state, of_state, 8);
  const auto unit_sums = checksums(units, of_units);
  const auto state_sums = checksums(state, of_state);
  {  // What nobody holds any more stays cached.
    Client passing = node.connect({.name = "passing"});
    Pool pool =
        must(passing.open_pool(small_pool("fixed", Execution::kInProcess, KvFormat::kNvfp4, 64)));
    Sequence sequence = pool.begin_sequence();
    must(sequence.extend(48));
    must(sequence.publish(text_tokens(48, 500000)));
  }
  REQUIRE(eventually([&] { return sessions_of(node).size() == 3; }));
  const auto pools = pools_of(node);
  const auto sessions = sessions_of(node);
  REQUIRE(group_of(node, "fixed")["cached"] == 3);
  uint64_t boot = in_process.client.boot_id();
  const uint64_t cache = in_process.client.cache_id();
  uint64_t round = 0;
  for (const int how : {SIGKILL, SIGTERM, SIGKILL, SIGKILL}) {
    node.replace_larderd(how);
    await_all_back(node, 3);
    ++round;
    INFO("round ", round);
    CHECK(pools_of(node) == pools);
    CHECK(sessions_of(node) == sessions);
    const auto status = node.ctl({"status"});
    CHECK(status["cache_id"] == cache);
    CHECK(status["recovered_pools"] == 3);
    CHECK(status["recovered_sessions"] == 3);
    for (Holder* holder : {&in_process, &on_request}) {
      CHECK(holder->sums() == holder->before);
      CHECK(holder->client.cache_id() == cache);
      CHECK(holder->client.boot_id() == status["boot_id"]);
      CHECK(holder->client.boot_id() != boot);
      CHECK(holder->client.resumes() == round);
      CHECK(holder->fixed.release(std::span(&holder->released, 1)).code() ==
            ErrorCode::kStaleGeneration);
    }
    boot = in_process.client.boot_id();
    CHECK(checksums(units, of_units) == unit_sums);
    CHECK(checksums(state, of_state) == state_sums);
    CHECK(must(on_request.fixed.lookup(text_tokens(48, 500000), false)).hit_tokens == 48);
  }
  // And all of it can be given back.
  for (Holder* holder : {&in_process, &on_request}) {
    CHECK(holder->fixed.release(holder->opened).ok());
    CHECK(holder->growing.release(holder->in_growing).ok());
    CHECK(holder->sequence.end().ok());
  }
  CHECK(group_of(node, "fixed")["open"] == 0);
  CHECK(group_of(node, "growing")["open"] == 0);
  // Two holds of each lookup that nothing has released.
  CHECK(group_of(node, "fixed")["published"] == 4);
}

TEST_CASE("a session that makes no calls is resumed by its own thread") {
  const ConfigFile config("resume_grace_ms = 2000\n");
  Node node(config.options());
  Client silent = node.connect({.name = "silent"});
  Pool pool = must(silent.open_pool(small_pool("p", Execution::kInProcess)));
  const auto blocks = must(pool.allocate(4));
  for (uint64_t round = 1; round <= 3; ++round) {
    node.replace_larderd(SIGKILL);
    CHECK(eventually([&] { return silent.resumes() == round; }));
    CHECK(group_of(node, "p")["open"] == 4);
  }
  CHECK(silent.longest_outage() > 0us);
  CHECK(pool.release(blocks).ok());
}

TEST_CASE("the counts of tokens and rows on request go on over a restart") {
  Node node;
  Client client = node.connect();
  Pool pool = must(client.open_pool(small_pool("p", Execution::kOnRequest, KvFormat::kBf16)));
  Sequence sequence = pool.begin_sequence();
  std::vector<float> rows(20 * 64, 0.5f);
  std::vector<float> out(20 * 64);
  const TensorView view = dense_tensor(rows.data(), Dtype::kFp32, 20, 1, 64);
  const auto append = [&](int layer) {
    must(sequence.append(layer, view, view));
    must(sequence.attend(layer, view, dense_tensor(out.data(), Dtype::kFp32, 20, 1, 64)));
  };
  must(sequence.extend(20));
  append(0);
  CHECK(node.ctl({"pools"})[0]["appended_tokens_total"] == 20);
  CHECK(node.ctl({"pools"})[0]["attended_rows_total"] == 20);
  node.replace_larderd(SIGKILL);
  CHECK(node.ctl({"pools"})[0]["appended_tokens_total"] == 20);
  append(1);
  CHECK(node.ctl({"pools"})[0]["appended_tokens_total"] == 40);
  CHECK(node.ctl({"pools"})[0]["attended_rows_total"] == 40);
  CHECK(out[0] == 0.5f);
}

TEST_CASE("a client that ends while larderd is down is gone when it is back") {
  Node node;
  Client watcher = node.connect();
  Pool pool = must(watcher.open_pool(small_pool("p", Execution::kInProcess)));
  std::optional<Client> leaving(node.connect());
  std::optional<Pool> its_pool(must(leaving->open_pool(small_pool("p", Execution::kOnRequest))));
  must(its_pool->allocate(3));
  node.larderd().signal(SIGKILL);
  REQUIRE(node.larderd().wait_exit(20s).has_value());
  its_pool.reset();
  leaving.reset();  // waits a second for its goodbye
  node.start_larderd();
  node.await_ready();
  // This process lives on, and so does its pidfd; but its end of the lifeline is closed.
  const bool gone = eventually([&] { return sessions_of(node).size() == 1; });
  CHECK_MESSAGE(gone, sessions_of(node).dump(1), node.log());
  CHECK(eventually([&] { return group_of(node, "p")["free"] == 8; }));
}

}  // namespace
}  // namespace larder::test
