// A C99 program against liblarder.so: connects, opens a pool, appends, attends, reads, publishes,
// looks up, and is refused. Argument: "in_process" or "on_request". Prints what it saw, one fact a
// line; c_api_program_test.cpp knows what must be printed.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "larder/larder.h"

enum { kTokens = 33, kDim = 64, kLayers = 2, kBlockTokens = 16 };

static float keys[kTokens * kDim];
static float values[kTokens * kDim];
static float queries[2 * kDim];
static float out[2 * kDim];

static void expect_ok(const char* what, larder_code code) {
  if (code == LARDER_OK) return;
  printf("%s: %s: %s\n", what, larder_code_name(code), larder_last_error());
  exit(1);
}

static void report(const char* what, larder_code code) {
  printf("%s: %s: %s\n", what, larder_code_name(code), larder_last_error());
}

// FNV-1a.
static uint64_t hash_of(const void* data, size_t size) {
  const unsigned char* bytes = data;
  uint64_t hash = UINT64_C(14695981039346656037);
  for (size_t i = 0; i < size; ++i) hash = (hash ^ bytes[i]) * UINT64_C(1099511628211);
  return hash;
}

static larder_pool* open_pool(larder_client* client, const char* execution) {
  larder_pool_options options = LARDER_POOL_OPTIONS_INIT;
  options.name = execution;
  options.model = "test";
  options.geometry.num_layers = kLayers;
  options.geometry.num_kv_heads = 1;
  options.geometry.block_tokens = kBlockTokens;
  options.geometry.k_dim = kDim;
  options.geometry.v_dim = kDim;
  options.num_blocks = 8;
  if (strcmp(execution, "on_request") == 0) options.execution = LARDER_EXECUTION_ON_REQUEST;
  larder_pool* pool = NULL;
  expect_ok("open_pool", larder_open_pool(client, &options, &pool));
  return pool;
}

// K is 1.5 and V 3 (even tokens) or 6 (odd ones): exact in nvfp4, where the block scales are 1/4,
// 1/2 and 1. The query is 0: attention is the mean of V.
static void fill(void) {
  for (int token = 0; token < kTokens; ++token) {
    for (int i = 0; i < kDim; ++i) {
      keys[token * kDim + i] = 1.5f;
      values[token * kDim + i] = token % 2 == 0 ? 3.0f : 6.0f;
    }
  }
  memset(queries, 0, sizeof queries);
}

static void attend(larder_sequence* sequence) {
  const larder_tensor k = larder_dense_tensor(keys, LARDER_DTYPE_FP32, kTokens, 1, kDim);
  const larder_tensor v = larder_dense_tensor(values, LARDER_DTYPE_FP32, kTokens, 1, kDim);
  expect_ok("extend", larder_sequence_extend(sequence, kTokens));
  for (int32_t layer = 0; layer < kLayers; ++layer)
    expect_ok("append", larder_sequence_append(sequence, layer, &k, &v));
  const larder_tensor q = larder_dense_tensor(queries, LARDER_DTYPE_FP32, 2, 1, kDim);
  const larder_tensor result = larder_dense_tensor(out, LARDER_DTYPE_FP32, 2, 1, kDim);
  float lse[2] = {-1.0f, -1.0f};
  expect_ok("attend", larder_sequence_attend(sequence, 1, &q, &result, lse, NULL));
  // Row 0 sees 32 tokens: 16 times 3 and 16 times 6. Row 1 sees one more 3.
  printf("attend: %.6f %.6f lse %.6f %.6f\n", out[0], out[kDim], lse[0], lse[1]);
}

static void read_back(larder_pool* pool, larder_sequence* sequence) {
  int64_t slots[kTokens];
  size_t count = 0;
  expect_ok("last_slots", larder_sequence_last_slots(sequence, slots, kTokens, &count));
  float k_row[2 * kDim];
  float v_row[2 * kDim];
  const larder_tensor k = larder_dense_tensor(k_row, LARDER_DTYPE_FP32, 2, 1, kDim);
  const larder_tensor v = larder_dense_tensor(v_row, LARDER_DTYPE_FP32, 2, 1, kDim);
  expect_ok("read", larder_pool_read(pool, 0, &k, &v, slots + 1, 2));
  printf("read: k %g v %g %g\n", k_row[kDim - 1], v_row[0], v_row[kDim]);

  int32_t ids[3];
  expect_ok("block_ids", larder_sequence_block_ids(sequence, ids, 3, &count));
  larder_pool_info info = LARDER_POOL_INFO_INIT;
  expect_ok("get_info", larder_pool_get_info(pool, &info));
  unsigned char* pages = malloc(2 * (size_t)info.page_bytes);
  if (pages == NULL) exit(1);
  expect_ok("read_pages",
            larder_pool_read_pages(pool, 1, ids, 2, pages, 2 * (size_t)info.page_bytes));
  printf("pages: %" PRIu64 " bytes hash %016" PRIx64 "\n", (uint64_t)info.page_bytes,
         hash_of(pages, 2 * (size_t)info.page_bytes));
  free(pages);
}

static void publish_and_look_up(larder_pool* pool, larder_sequence* sequence) {
  int32_t tokens[kTokens];
  for (int32_t i = 0; i < kTokens; ++i) tokens[i] = 1000 + i;
  expect_ok("publish", larder_sequence_publish(sequence, tokens, kTokens, NULL));
  larder_block blocks[2];
  size_t num_blocks = 0;
  int64_t hit_tokens = 0;
  expect_ok("lookup", larder_pool_lookup(pool, tokens, kTokens, 1, NULL, NULL, 0, blocks, 2,
                                         &num_blocks, &hit_tokens));
  printf("lookup: %zu blocks %" PRId64 " tokens\n", num_blocks, hit_tokens);
  expect_ok("release", larder_pool_release(pool, blocks, num_blocks));
}

static void be_refused(larder_pool* pool, larder_sequence* sequence) {
  larder_block blocks[9];
  report("too many blocks", larder_pool_allocate(pool, 9, blocks));
  const larder_tensor q = larder_dense_tensor(queries, LARDER_DTYPE_FP32, 2, 1, kDim);
  report("layer", larder_sequence_attend(sequence, kLayers, &q, &q, NULL, NULL));
  report("null", larder_pool_scrub(NULL, NULL, 0));
  larder_attend_options options = LARDER_ATTEND_OPTIONS_INIT;
  options.causal = 2;
  report("causal", larder_sequence_attend(sequence, 0, &q, &q, NULL, &options));
}

int main(int argc, char** argv) {
  larder_client_options options = LARDER_CLIENT_OPTIONS_INIT;
  larder_client* client = NULL;
  if (argc != 2) return 2;
  options.name = "c";
  expect_ok("connect", larder_connect(&options, &client));
  larder_pool* pool = open_pool(client, argv[1]);
  larder_sequence* sequence = NULL;
  expect_ok("begin", larder_sequence_begin(pool, &sequence));
  fill();
  attend(sequence);
  read_back(pool, sequence);
  publish_and_look_up(pool, sequence);
  be_refused(pool, sequence);
  // The parents go first, as they may.
  larder_client_destroy(client);
  larder_pool_destroy(pool);
  expect_ok("end", larder_sequence_end(sequence));
  larder_sequence_destroy(sequence);
  puts("done");
  return 0;
}
