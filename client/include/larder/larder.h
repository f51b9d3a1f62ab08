// The C API of the client library: connect to a daemon, open a pool, append K and V, attend.
//
//     larder_client_options options = LARDER_CLIENT_OPTIONS_INIT;
//     larder_client* client = NULL;
//     if (larder_connect(&options, &client) != LARDER_OK) puts(larder_last_error());
//
// The calls of the C++ API but those in a stream and RoPE, with the same meaning; what shapes,
// units and options mean is said in larder/client.h and larder/attention.h. C99 and C++; no
// exception leaves a function.
//
// Errors: every call that can fail returns a code; larder_last_error() has the sentence, which
// names the field, the value and what is expected. A refused call changes nothing and writes none
// of its outputs, except that a handle to be made becomes NULL and that a count, where an array is
// too small, becomes the number needed. NULL where a handle, struct or array is required, a number
// that is none of an enumeration and a struct_size of 0 are INVALID_ARGUMENT.
//
// Arrays are a pointer and a number of entries; NULL goes with 0. Strings end with a NUL; `adapter`
// may be NULL: "". Structs named `options` may be NULL for the defaults, those of a pool excepted.
//
// Lifetime: handles are made by larder_connect, larder_open_pool, larder_sequence_begin and
// larder_sequence_fork, and each is destroyed once; NULL is ignored. A sequence keeps its pool, a
// pool its client, so the order of destruction does not matter: a session ends when the last handle
// made from it goes.
//
// Thread rule: a client, and the pools and sequences made from it, are used by one thread at a
// time. Different clients are independent. Calls without a handle are for any thread. Every client
// has a thread of its own that takes the session up again when the daemon has restarted; a forked
// child does not have it, and must not use or destroy the handles.
#pragma once

#include "larder/larder_types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct larder_client larder_client;
typedef struct larder_pool larder_pool;
typedef struct larder_sequence larder_sequence;

// "0.1.0". Symbols and struct layouts stay compatible within a SONAME.
const char* larder_version(void);
// "INVALID_ARGUMENT" and so on; "UNKNOWN_CODE" for a number that is none.
const char* larder_code_name(larder_code code);
// Why this thread's last call that returns a code failed; "" if it did not. Never NULL; valid until
// the thread's next such call. Destroying a handle leaves it alone.
const char* larder_last_error(void);

// Names as in files and messages: "nvfp4". Of a number that is none: "UNKNOWN". A name that is none
// is INVALID_ARGUMENT.
const char* larder_dtype_name(larder_dtype dtype);
const char* larder_kv_format_name(larder_kv_format format);
const char* larder_encoder_name(larder_encoder encoder);
const char* larder_key_transform_name(larder_key_transform transform);
const char* larder_mla_row_name(larder_mla_row row);
const char* larder_layout_name(larder_layout layout);
larder_code larder_dtype_from_name(const char* name, larder_dtype* dtype);
larder_code larder_kv_format_from_name(const char* name, larder_kv_format* format);
larder_code larder_encoder_from_name(const char* name, larder_encoder* encoder);
larder_code larder_key_transform_from_name(const char* name, larder_key_transform* transform);
larder_code larder_mla_row_from_name(const char* name, larder_mla_row* row);
larder_code larder_layout_from_name(const char* name, larder_layout* layout);

// A dense row-major tensor. Nothing is checked here: the call that takes it does.
larder_tensor larder_dense_tensor(void* data, larder_dtype dtype, int64_t tokens, int64_t heads,
                                  int64_t dim);
// The geometry of MLA layers: one KV head, keys of 576 and values of 512 elements.
larder_code larder_mla_geometry(int32_t num_layers, int32_t block_tokens, larder_mla_row row,
                                larder_geometry* geometry);
larder_code larder_geometry_page_layout(const larder_geometry* geometry,
                                        larder_page_layout* layout);
// Pages without gaps, one after another, each K data, K scales, V data, V scales in `order`.
larder_code larder_dense_pages(void* base, const larder_geometry* geometry, int64_t num_pages,
                               larder_page_order order, larder_v_scale_order v_scale_order,
                               larder_paged_kv* paged);

// ---- Client: a session with the daemon.

larder_code larder_connect(const larder_client_options* options, larder_client** client);
void larder_client_destroy(larder_client* client);
larder_code larder_client_session_id(const larder_client* client, uint64_t* session_id);
// Changes when the daemon has restarted.
larder_code larder_client_boot_id(const larder_client* client, uint64_t* boot_id);
// Stays over restarts of the daemon that lose nothing.
larder_code larder_client_cache_id(const larder_client* client, uint64_t* cache_id);
// How often the session was resumed, and the longest time from a loss to that, in microseconds.
larder_code larder_client_resumes(const larder_client* client, uint64_t* resumes);
larder_code larder_client_longest_outage(const larder_client* client, int64_t* outage_us);

// ---- Pool: the KV memory of one model.

larder_code larder_open_pool(larder_client* client, const larder_pool_options* options,
                             larder_pool** pool);
// Detaches; the pool and its published blocks stay in the daemon.
void larder_pool_destroy(larder_pool* pool);
larder_code larder_pool_get_info(const larder_pool* pool, larder_pool_info* info);
// A group of the pool as a pool of its own, to be destroyed on its own; a pool is its first group.
larder_code larder_pool_group(const larder_pool* pool, int32_t index, larder_pool** group);
// Grows or shrinks the group, in whole segments. result may be NULL.
larder_code larder_pool_resize(larder_pool* pool, int64_t num_blocks, larder_resize_result* result);
// Evicts cached blocks of the whole pool until num_blocks are free again or none is left; in a pool
// with several groups whole units, so that more may go. result may be NULL.
larder_code larder_pool_evict(larder_pool* pool, int64_t num_blocks, larder_resize_result* result);
// The group's memory in this process, mapped on first use, until the pool is closed.
larder_code larder_pool_data(larder_pool* pool, void** data);
// *num_groups becomes the number there is. INVALID_ARGUMENT if that is more than capacity; NULL
// with 0 asks.
larder_code larder_pool_stats(larder_pool* pool, larder_group_stats* groups, size_t capacity,
                              size_t* num_groups);

// All or nothing. blocks: [num_blocks].
larder_code larder_pool_allocate(larder_pool* pool, size_t num_blocks, larder_block* blocks);
larder_code larder_pool_release(larder_pool* pool, const larder_block* blocks, size_t num_blocks);
// tokens: all tokens from the root; blocks: the full blocks that hold them, from the first. extra:
// none, or bytes (of an image, say) for each full block, part of its key. published: [num_blocks],
// or NULL.
larder_code larder_pool_publish(larder_pool* pool, const int32_t* tokens, size_t num_tokens,
                                const larder_block* blocks, size_t num_blocks, const char* adapter,
                                const larder_bytes* extra, size_t num_extra,
                                larder_published_block* published);
// The longest published prefix of `tokens`. hold is a flag: the blocks become the session's, to be
// released; then capacity is at least num_tokens / block_tokens, so that none can be lost. Without
// a hold, blocks may be NULL with capacity 0, and hit_tokens alone tells the length. hit_tokens is
// a multiple of block_tokens, and *num_blocks that many blocks.
larder_code larder_pool_lookup(larder_pool* pool, const int32_t* tokens, size_t num_tokens,
                               int32_t hold, const char* adapter, const larder_bytes* extra,
                               size_t num_extra, larder_block* blocks, size_t capacity,
                               size_t* num_blocks, int64_t* hit_tokens);
// The same for pools with several groups, in units of larder_pool_info.unit_tokens tokens (see
// larder/client.h). blocks: [num_groups] arrays of num_blocks[g] entries; id -1 where a group has
// no block. published: NULL, or as many arrays of as many entries.
larder_code larder_pool_publish_units(larder_pool* pool, const int32_t* tokens, size_t num_tokens,
                                      const larder_block* const* blocks, const size_t* num_blocks,
                                      size_t num_groups, const char* adapter,
                                      const larder_bytes* extra, size_t num_extra,
                                      larder_published_block* const* published);
// blocks: [num_groups] arrays with room for capacities[g] entries: the blocks of all whole units of
// `tokens`, at least; num_blocks: [num_groups].
larder_code larder_pool_lookup_units(larder_pool* pool, const int32_t* tokens, size_t num_tokens,
                                     int32_t hold, const char* adapter, const larder_bytes* extra,
                                     size_t num_extra, larder_block* const* blocks,
                                     const size_t* capacities, size_t num_groups,
                                     size_t* num_blocks, int64_t* hit_tokens);
// from, to: [num_blocks].
larder_code larder_pool_copy(larder_pool* pool, const larder_block* from, const larder_block* to,
                             size_t num_blocks);

// k: [num_rows, num_kv_heads, k_dim], v: [num_rows, num_kv_heads, v_dim]; MLA pools: the latent
// [num_rows, 1, 512] and the rope part [num_rows, 1, 64]. slots: block id * block_tokens + offset;
// negative: the row is skipped.
larder_code larder_pool_append(larder_pool* pool, int32_t layer, const larder_tensor* k,
                               const larder_tensor* v, const int64_t* slots, size_t num_slots);
larder_code larder_pool_attend(larder_pool* pool, int32_t layer, const larder_attend_batch* batch,
                               const larder_attend_options* options);
larder_code larder_pool_sparse_attend(larder_pool* pool, int32_t layer,
                                      const larder_sparse_batch* batch,
                                      const larder_attend_options* options);
larder_code larder_pool_gather(larder_pool* pool, int32_t layer, const larder_gather_batch* batch);
// Row i of k_out and v_out becomes the token in slots[i], dequantised; negative: the row stays.
larder_code larder_pool_read(larder_pool* pool, int32_t layer, const larder_tensor* k_out,
                             const larder_tensor* v_out, const int64_t* slots, size_t num_slots);

// Whole pages of one layer, or whole opaque blocks (layer 0), one after another as they lie in the
// pool: size_bytes is num_blocks * page_bytes. blocks: block ids.
larder_code larder_pool_read_pages(larder_pool* pool, int32_t layer, const int32_t* blocks,
                                   size_t num_blocks, void* bytes, size_t size_bytes);
larder_code larder_pool_write_pages(larder_pool* pool, int32_t layer, const int32_t* blocks,
                                    size_t num_blocks, const void* bytes, size_t size_bytes);
// Whole blocks, one after another, the layers of each one after another: size_bytes is num_blocks *
// num_layers * page_bytes.
larder_code larder_pool_read_blocks(larder_pool* pool, const int32_t* blocks, size_t num_blocks,
                                    void* bytes, size_t size_bytes);
larder_code larder_pool_write_blocks(larder_pool* pool, const int32_t* blocks, size_t num_blocks,
                                     const void* bytes, size_t size_bytes);
// Pages, to and from an engine's own layout; bytes are moved, never requantised.
larder_code larder_pool_export_pages(larder_pool* pool, int32_t layer, const int32_t* blocks,
                                     size_t num_blocks, const larder_paged_kv* paged);
larder_code larder_pool_import_pages(larder_pool* pool, int32_t layer, const int32_t* blocks,
                                     size_t num_blocks, const larder_paged_kv* paged);
// Zeroes open blocks of this session, all layers.
larder_code larder_pool_scrub(larder_pool* pool, const int32_t* blocks, size_t num_blocks);
// figures: [num_blocks], one per block over all its layers; equal bytes give equal figures.
larder_code larder_pool_checksum(larder_pool* pool, const int32_t* blocks, size_t num_blocks,
                                 uint64_t* figures);

// ---- Sequence: a block table that grows.

larder_code larder_sequence_begin(larder_pool* pool, larder_sequence** sequence);
// Releases the blocks.
void larder_sequence_destroy(larder_sequence* sequence);
larder_code larder_sequence_num_tokens(const larder_sequence* sequence, int64_t* num_tokens);
// Copies of what the sequence has. *count becomes the number there is. INVALID_ARGUMENT if that is
// more than capacity; NULL with 0 asks. last_slots: of the tokens of the last extend.
larder_code larder_sequence_blocks(const larder_sequence* sequence, larder_block* blocks,
                                   size_t capacity, size_t* count);
larder_code larder_sequence_block_ids(const larder_sequence* sequence, int32_t* block_ids,
                                      size_t capacity, size_t* count);
larder_code larder_sequence_last_slots(const larder_sequence* sequence, int64_t* slots,
                                       size_t capacity, size_t* count);

// Starts an empty sequence from the longest published prefix of `tokens`, but never all of them.
// *adopted_tokens becomes the number that need no computing.
larder_code larder_sequence_adopt_prefix(larder_sequence* sequence, const int32_t* tokens,
                                         size_t num_tokens, const char* adapter,
                                         int64_t* adopted_tokens);
// Makes room for num_tokens more tokens. All or nothing.
larder_code larder_sequence_extend(larder_sequence* sequence, int64_t num_tokens);
// K and V of the tokens of the last extend.
larder_code larder_sequence_append(larder_sequence* sequence, int32_t layer, const larder_tensor* k,
                                   const larder_tensor* v);
// Attention of the last q->shape[0] tokens over the whole sequence. lse may be NULL.
larder_code larder_sequence_attend(larder_sequence* sequence, int32_t layer, const larder_tensor* q,
                                   const larder_tensor* out, float* lse,
                                   const larder_attend_options* options);
// Publishes the full blocks, every layer of which has been appended. tokens: of all tokens so far.
larder_code larder_sequence_publish(larder_sequence* sequence, const int32_t* tokens,
                                    size_t num_tokens, const char* adapter);
// A second sequence over the same tokens, to be destroyed on its own.
larder_code larder_sequence_fork(const larder_sequence* sequence, larder_sequence** fork);
// Forgets the tokens from num_tokens on.
larder_code larder_sequence_truncate(larder_sequence* sequence, int64_t num_tokens);
// Releases the blocks. The sequence is empty afterwards.
larder_code larder_sequence_end(larder_sequence* sequence);

// ---- Results of several attentions.

// Joins states with weights exp(lse - max); a state whose lse is not finite does not count. `out`
// and `lse` (or NULL) may be one of the states' memory.
larder_code larder_merge_states(const larder_attention_state* states, size_t num_states,
                                const larder_tensor* out, float* lse,
                                const larder_merge_options* options);
// One rank's share of a context-parallel attention, in place. lses: [num_ranks, rows, heads] of
// out's rows and heads. total_lse: [rows, heads] or NULL.
larder_code larder_combine_rank(const larder_tensor* out, const float* lses, int64_t num_ranks,
                                int64_t rank, float* total_lse,
                                const larder_combine_options* options);

// ---- Contexts that are spread over ranks (larder_attend_options.shard).

// How many of a sequence's first `tokens` tokens the rank holds: also where in its cache the next
// of its tokens belongs. tokens: 0 to 2^31 - 1.
larder_code larder_local_tokens(const larder_context_shard* shard, int64_t tokens, int64_t* count);
// The place in the sequence of the rank's token number `local`: 0 to 2^31 - 1.
larder_code larder_global_token(const larder_context_shard* shard, int64_t local, int64_t* token);

#ifdef __cplusplus
}
#endif
