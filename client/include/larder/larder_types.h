// The types of the C API (larder/larder.h): codes, numbers of enumerations, structs and defaults.
//
// Structs that begin with struct_size may grow at their end. Start them from their LARDER_..._INIT,
// which sets struct_size and the defaults: a library that is newer than this header completes what
// is missing with defaults, an older one refuses what it does not know unless it is zero. All other
// structs keep their shape for good. `reserved` must be 0.
//
// Enumerations are fixed-width numbers, flags are 0 or 1; other values are refused by field name.
// Numbers are those of the C++ API, and what the fields mean is said in larder/client.h,
// larder/attention.h, larder/kv_format.h and larder/paged_kv.h. C99 and C++.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum larder_code {
  LARDER_OK = 0,
  LARDER_INVALID_ARGUMENT = 1,
  LARDER_UNSUPPORTED = 2,         // legal, but this build or device has no way to do it
  LARDER_RESOURCE_EXHAUSTED = 3,  // no room now, in the daemon or in this process
  LARDER_NOT_FOUND = 4,
  LARDER_STALE_GENERATION = 5,  // the block was released and may belong to somebody else
  LARDER_STALE_SESSION = 6,     // the daemon does not know this session (any more)
  LARDER_PERMISSION_DENIED = 7,
  LARDER_BUSY = 8,
  LARDER_DEADLINE_EXCEEDED = 9,
  LARDER_SHUTTING_DOWN = 10,
  LARDER_UNAVAILABLE = 11,  // the daemon is not there (now)
  LARDER_INTERNAL = 12
} larder_code;

typedef uint32_t larder_dtype;  // element type of a tensor
enum {
  LARDER_DTYPE_BF16 = 0,
  LARDER_DTYPE_FP16 = 1,
  LARDER_DTYPE_FP32 = 2,
  LARDER_DTYPE_FP8_E4M3 = 3,  // outputs only
  LARDER_DTYPE_E2M1X2 = 4     // outputs only: bytes of two E2M1 values, even element low
};

typedef uint32_t larder_kv_format;  // how K or V rows are stored
enum {
  LARDER_KV_FORMAT_BF16 = 0,
  LARDER_KV_FORMAT_FP16 = 1,
  LARDER_KV_FORMAT_FP8_E4M3 = 2,
  LARDER_KV_FORMAT_FP8_E5M2 = 3,
  LARDER_KV_FORMAT_NVFP4 = 4
};

typedef uint32_t larder_encoder;  // which search chooses the block scales of nvfp4
enum {
  LARDER_ENCODER_REFERENCE = 0,
  LARDER_ENCODER_FOUR_OVER_SIX = 1,
  LARDER_ENCODER_BEST_SCALE = 2
};

typedef uint32_t larder_key_transform;  // done to keys before they are stored
enum {
  LARDER_KEY_TRANSFORM_NONE = 0,
  LARDER_KEY_TRANSFORM_CENTRED = 1,
  LARDER_KEY_TRANSFORM_ROTATED = 2,
  LARDER_KEY_TRANSFORM_CENTRED_ROTATED = 3
};

typedef uint32_t larder_mla_row;  // how one token of an MLA layer is stored
enum {
  LARDER_MLA_ROW_NONE = 0,  // not an MLA pool
  LARDER_MLA_ROW_NVFP4_DS = 1,
  LARDER_MLA_ROW_FP8_DS = 2,
  LARDER_MLA_ROW_FP8 = 3,
  LARDER_MLA_ROW_BF16 = 4
};

typedef uint32_t larder_layout;  // which comes first in the pool's memory
enum { LARDER_LAYOUT_BLHNC = 0, LARDER_LAYOUT_LBHNC = 1 };

typedef uint32_t larder_execution;  // where kernels run
enum { LARDER_EXECUTION_IN_PROCESS = 0, LARDER_EXECUTION_ON_REQUEST = 1 };

typedef uint32_t larder_v_scale_order;
enum { LARDER_V_SCALE_ORDER_LINEAR = 0, LARDER_V_SCALE_ORDER_SWIZZLED = 1 };

typedef uint32_t larder_page_order;  // of tokens and heads inside a page
enum { LARDER_PAGE_ORDER_NHD = 0, LARDER_PAGE_ORDER_HND = 1 };

// Bits of larder_lse_form. 0 is natural log, without the sink, [tokens, heads].
typedef uint32_t larder_lse_form;
enum { LARDER_LSE_BASE2 = 1, LARDER_LSE_INCLUDES_SINK = 2, LARDER_LSE_HEADS_FIRST = 4 };

// [tokens, heads, dim], any strides, in elements. The memory is the caller's, during the call only.
typedef struct larder_tensor {
  void* data;  // NULL only where an axis is 0; inputs are not written
  larder_dtype dtype;
  uint32_t reserved;
  int64_t shape[3];
  int64_t strides[3];
} larder_tensor;

typedef struct larder_block {
  int32_t id;  // what block tables and slots are made of
  uint32_t generation;
} larder_block;

typedef struct larder_published_block {
  uint8_t key[32];
  larder_block block;  // holds the key: the given block, or an older one with the same content
} larder_published_block;

typedef struct larder_bytes {
  const void* data;
  size_t size;
} larder_bytes;

// The shape of a pool's layers. MLA: larder_mla_geometry fills it.
typedef struct larder_geometry {
  int32_t num_layers;
  int32_t num_kv_heads;
  int32_t block_tokens;
  int32_t k_dim;
  int32_t v_dim;
  larder_kv_format k_format;
  larder_kv_format v_format;
  larder_mla_row mla_row;
} larder_geometry;

// Byte offsets of the four regions of a page, and its size.
typedef struct larder_page_layout {
  int64_t k_data_offset_bytes;
  int64_t k_scale_offset_bytes;
  int64_t v_data_offset_bytes;
  int64_t v_scale_offset_bytes;
  int64_t page_bytes;
} larder_page_layout;

// Strings that are NULL stand for their defaults.
typedef struct larder_client_options {
  size_t struct_size;
  const char* socket_path;  // NULL: $LARDER_SOCKET, else /run/larder/larderd.sock
  const char* tenant;       // NULL: "default"
  const char* token;        // NULL: none
  const char* name;         // NULL: "client"; shown in `larderctl sessions`
  int64_t deadline_us;      // of every call
  int64_t arena_bytes;      // staging for on-request calls; 0: none
} larder_client_options;
#define LARDER_CLIENT_OPTIONS_INIT \
  { sizeof(larder_client_options), NULL, NULL, NULL, NULL, 10000000, 33554432 }

// A further group of a pool: layers of another geometry.
typedef struct larder_group_options {
  size_t struct_size;
  const char* group_name;  // unique in the pool; NULL: "attention", "mla" or "opaque"
  larder_geometry geometry;
  larder_encoder encoder;
  larder_key_transform key_transform;
  const float* key_offsets;
  size_t num_key_offsets;
  int64_t opaque_block_bytes;
  int64_t num_blocks;
  int64_t max_blocks;
  int64_t segment_bytes;
  larder_layout layout;
  int32_t window_tokens;
  int32_t reserve_block_zero;
  uint32_t reserved;
  const double* k_scales;
  size_t num_k_scales;
  const double* v_scales;
  size_t num_v_scales;
} larder_group_options;
#define LARDER_GROUP_OPTIONS_INIT                                                             \
  {                                                                                           \
    sizeof(larder_group_options), NULL,                                                       \
        {0, 0, 0, 0, 0, LARDER_KV_FORMAT_NVFP4, LARDER_KV_FORMAT_NVFP4, LARDER_MLA_ROW_NONE}, \
        LARDER_ENCODER_REFERENCE, LARDER_KEY_TRANSFORM_NONE, NULL, 0, 0, 0, 0, 0,             \
        LARDER_LAYOUT_BLHNC, -1, 0, 0, NULL, 0, NULL, 0                                       \
  }

typedef struct larder_pool_options {
  size_t struct_size;
  const char* name;   // unique within the tenant; opening an existing pool attaches to it
  const char* model;  // model and revision; part of every prefix key
  larder_geometry geometry;
  larder_encoder encoder;
  larder_key_transform key_transform;
  const float*
      key_offsets;  // [num_layers, num_kv_heads, k_dim] for the centred transforms, or NULL
  size_t num_key_offsets;
  int64_t opaque_block_bytes;  // > 0: an opaque pool; of geometry, block_tokens alone is used
  int64_t num_blocks;
  int64_t max_blocks;  // 0: num_blocks; more: larder_pool_resize grows the group up to this
  larder_layout layout;
  larder_execution execution;
  int32_t window_tokens;       // -1: none
  int32_t reserve_block_zero;  // flag: keep block 0 as a null block
  const double* k_scales;      // NULL: 1; one entry: all layers; else one per layer
  size_t num_k_scales;
  const double* v_scales;  // likewise
  size_t num_v_scales;
  int64_t segment_bytes;   // of one segment of a group that grows; 0: the daemon chooses
  const char* group_name;  // of the first group, as above
  const larder_group_options* const* more_groups;  // [num_more_groups], or NULL
  size_t num_more_groups;
} larder_pool_options;
#define LARDER_POOL_OPTIONS_INIT                                                                  \
  {                                                                                               \
    sizeof(larder_pool_options), NULL, NULL,                                                      \
        {0, 0, 0, 0, 0, LARDER_KV_FORMAT_NVFP4, LARDER_KV_FORMAT_NVFP4, LARDER_MLA_ROW_NONE},     \
        LARDER_ENCODER_REFERENCE, LARDER_KEY_TRANSFORM_NONE, NULL, 0, 0, 0, 0,                    \
        LARDER_LAYOUT_BLHNC, LARDER_EXECUTION_IN_PROCESS, -1, 0, NULL, 0, NULL, 0, 0, NULL, NULL, \
        0                                                                                         \
  }

// What is fixed while a pool is open. Written by larder_pool_get_info, as far as struct_size goes.
typedef struct larder_pool_info {
  size_t struct_size;
  larder_geometry geometry;
  larder_execution execution;
  int32_t created;  // flag; 0: attached to a pool that was there
  int64_t num_blocks;
  int64_t page_bytes;          // one layer of one block; of opaque pools, one block
  int64_t block_stride_bytes;  // block b, layer l lies at data + b * block_stride_bytes
  int64_t layer_stride_bytes;  //                              + l * layer_stride_bytes
  int64_t max_blocks;          // block ids go up to this
  int64_t num_groups;          // of the whole pool
  int64_t unit_tokens;         // of the whole pool: see larder_pool_publish_units
} larder_pool_info;
#define LARDER_POOL_INFO_INIT \
  { sizeof(larder_pool_info), {0, 0, 0, 0, 0, 0, 0, 0}, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

typedef struct larder_resize_result {
  int64_t blocks_before;
  int64_t blocks_after;
  int64_t bytes_before;
  int64_t bytes_after;
} larder_resize_result;

typedef struct larder_group_stats {
  char name[136];                                                // ends with a NUL
  int64_t capacity, free, open, published, cached, quarantined;  // blocks
  int64_t physical_bytes, used_bytes, slack_bytes;
  int64_t max_blocks;
  int64_t evictable;      // blocks
  int64_t leaving_bytes;  // in segments that sessions have not unmapped yet
  // Of the quarantined blocks; the rest waits for the executor only.
  int64_t quarantined_pidfd, quarantined_mps, quarantined_unprovable;
} larder_group_stats;

// Token t is with rank t / interleave % num_ranks. All 0: the context is not spread over ranks.
typedef struct larder_context_shard {
  int32_t num_ranks, rank, interleave;
} larder_context_shard;

typedef struct larder_attend_options {
  size_t struct_size;
  float scale;          // 0: 1 / sqrt(k_dim); MLA pools have no default
  int32_t causal;       // flag
  int32_t window_left;  // -1: no window
  float soft_cap;       // 0: off
  const float* sinks;   // [num_q_heads] logits, or NULL
  size_t num_sinks;
  const float* alibi_slopes;  // [num_q_heads], or NULL
  size_t num_alibi_slopes;
  int32_t partial;     // flag: one part of a larger attention, for larder_merge_states
  int32_t num_splits;  // 0: automatic
  larder_lse_form lse_form;
  float out_scale;     // fp8_e4m3 output
  float out_sf_scale;  // e2m1x2 output: an encode scale
  uint32_t reserved;
  int64_t out_sf_first_row;      // e2m1x2 output
  int32_t deterministic;         // flag: the same bits in any batch
  int32_t shared_prefix_tokens;  // 0: none; -1: found where it can be
  larder_context_shard shard;    // not of larder_sequence_attend
  uint32_t reserved_2;           // as reserved
} larder_attend_options;
#define LARDER_ATTEND_OPTIONS_INIT                                                                 \
  {                                                                                                \
    sizeof(larder_attend_options), 0.0f, 1, -1, 0.0f, NULL, 0, NULL, 0, 0, 0, 0, 1.0f, 1.0f, 0, 0, \
        0, 0, {0, 0, 0}, 0                                                                         \
  }

typedef struct larder_attend_batch {
  size_t struct_size;
  larder_tensor q;          // [sum of q_lens, num_q_heads, k_dim]
  larder_tensor out;        // [sum of q_lens, num_q_heads, v_dim]; e2m1x2: v_dim / 2
  float* lse;               // [sum of q_lens, num_q_heads] or as lse_form says, or NULL
  const int32_t* q_lens;    // [num_seqs]
  const int32_t* seq_lens;  // [num_seqs], the q rows included
  size_t num_seqs;
  const int32_t* block_table;  // [num_seqs, block_table_stride], block ids
  int64_t block_table_stride;
  const uint8_t* mask;  // packed bits, or NULL
  size_t mask_bytes;
  const int64_t* mask_offsets;  // [num_seqs] with a mask, else unused
  uint8_t* out_sf;              // e2m1x2 only, else NULL
  size_t out_sf_bytes;
} larder_attend_batch;
#define LARDER_ZERO_TENSOR                             \
  {                                                    \
    NULL, LARDER_DTYPE_BF16, 0, {0, 0, 0}, { 0, 0, 0 } \
  }
#define LARDER_ATTEND_BATCH_INIT                                                              \
  {                                                                                           \
    sizeof(larder_attend_batch), LARDER_ZERO_TENSOR, LARDER_ZERO_TENSOR, NULL, NULL, NULL, 0, \
        NULL, 0, NULL, 0, NULL, NULL, 0                                                       \
  }

// MLA pools only. Of the options scale, sinks, lse_form and out_scale are used.
typedef struct larder_sparse_batch {
  size_t struct_size;
  larder_tensor q;         // [num_rows, num_q_heads, 576]
  larder_tensor out;       // [num_rows, num_q_heads, 512]
  float* lse;              // [num_rows, num_q_heads] or as lse_form says, or NULL
  const int32_t* indices;  // [num_rows, top_k] slots; negative or past the pool: ignored
  int64_t top_k;
  const int32_t* topk_lens;  // [num_rows], or NULL
} larder_sparse_batch;
#define LARDER_SPARSE_BATCH_INIT \
  { sizeof(larder_sparse_batch), LARDER_ZERO_TENSOR, LARDER_ZERO_TENSOR, NULL, NULL, 0, NULL }

// A tensor with shape[0] = 0 is not wanted.
typedef struct larder_gather_batch {
  size_t struct_size;
  larder_tensor k_out;      // [rows, num_kv_heads, k_dim]; MLA: [rows, 1, 576]
  larder_tensor v_out;      // [rows, num_kv_heads, v_dim]
  const int32_t* seq_lens;  // [num_seqs]
  size_t num_seqs;
  const int32_t* block_table;  // [num_seqs, block_table_stride]
  int64_t block_table_stride;
  int64_t rows_per_sequence;    // 0: sequences follow one another
  const int32_t* first_tokens;  // [num_seqs], 0 to seq_len, or NULL: 0
} larder_gather_batch;
#define LARDER_GATHER_BATCH_INIT \
  { sizeof(larder_gather_batch), LARDER_ZERO_TENSOR, LARDER_ZERO_TENSOR, NULL, 0, NULL, 0, 0, NULL }

// The row of (page p, head h, token t) lies at base + p * page + h * head + t * token, in bytes.
typedef struct larder_paged_rows {
  void* base;
  int64_t page_stride_bytes;
  int64_t head_stride_bytes;
  int64_t token_stride_bytes;
} larder_paged_rows;

// One layer of an engine's own paged cache. larder_dense_pages fills it for pages without gaps.
typedef struct larder_paged_kv {
  size_t struct_size;
  larder_paged_rows k_data;
  larder_paged_rows k_scale;
  larder_paged_rows v_data;
  larder_paged_rows v_scale;  // where swizzled: the strides of the same region if it were linear
  larder_geometry geometry;   // block_tokens: tokens of one page; num_layers: 1
  int64_t num_pages;
  larder_v_scale_order v_scale_order;
  uint32_t reserved;
} larder_paged_kv;
#define LARDER_ZERO_ROWS \
  { NULL, 0, 0, 0 }
#define LARDER_PAGED_KV_INIT                                                                     \
  {                                                                                              \
    sizeof(larder_paged_kv), LARDER_ZERO_ROWS, LARDER_ZERO_ROWS, LARDER_ZERO_ROWS,               \
        LARDER_ZERO_ROWS,                                                                        \
        {0, 0, 0, 0, 0, LARDER_KV_FORMAT_NVFP4, LARDER_KV_FORMAT_NVFP4, LARDER_MLA_ROW_NONE}, 0, \
        LARDER_V_SCALE_ORDER_LINEAR, 0                                                           \
  }

// One part of an attention over disjoint keys, computed without sinks.
typedef struct larder_attention_state {
  larder_tensor out;  // [rows, heads, dim]
  const float* lse;   // [rows, heads] or as state_form says
} larder_attention_state;

typedef struct larder_merge_options {
  size_t struct_size;
  larder_lse_form state_form;
  larder_lse_form lse_form;
  const float* sinks;  // [heads] logits, or NULL: applied once, to the result
  size_t num_sinks;
  float out_scale;
  uint32_t reserved;
} larder_merge_options;
#define LARDER_MERGE_OPTIONS_INIT \
  { sizeof(larder_merge_options), 0, 0, NULL, 0, 1.0f, 0 }

typedef struct larder_combine_options {
  size_t struct_size;
  const float* sinks;  // [heads] logits, or NULL
  size_t num_sinks;
  larder_lse_form lse_form;  // of lses and of total_lse
  uint32_t reserved;
} larder_combine_options;
#define LARDER_COMBINE_OPTIONS_INIT \
  { sizeof(larder_combine_options), NULL, 0, 0, 0 }

#ifdef __cplusplus
}
#endif
