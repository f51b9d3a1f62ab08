// The C API without a daemon: codes, sentences, names, defaults, growth of structs, and what is
// done with arguments that are wrong.
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <sys/resource.h>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "client/c_api_support.h"
#include "larder/system_error.h"

namespace larder::c_api {
namespace {

std::string error() { return larder_last_error(); }
bool error_has(const std::string& text) {
  INFO(error());
  return error().find(text) != std::string::npos;
}

TEST_CASE("a code is the number of its C++ twin and has its name") {
  for (int i = 0; i < kNumErrorCodes; ++i)
    CHECK(larder_code_name(static_cast<larder_code>(i)) ==
          std::string(error_code_name(static_cast<ErrorCode>(i))));
  CHECK(larder_code_name(LARDER_OK) == std::string("OK"));
  CHECK(larder_code_name(LARDER_STALE_SESSION) == std::string("STALE_SESSION"));
  CHECK(larder_code_name(static_cast<larder_code>(13)) == std::string("UNKNOWN_CODE"));
  CHECK(std::string(larder_version()).find("0.") == 0);
}

TEST_CASE("names and numbers of enumerations turn into each other") {
  larder_kv_format format = 99;
  CHECK(larder_kv_format_from_name("nvfp4", &format) == LARDER_OK);
  CHECK(format == LARDER_KV_FORMAT_NVFP4);
  CHECK(larder_kv_format_from_name("fp8_e5m2", &format) == LARDER_OK);
  CHECK(format == LARDER_KV_FORMAT_FP8_E5M2);
  CHECK(larder_kv_format_from_name("NVFP4", &format) == LARDER_INVALID_ARGUMENT);
  CHECK(error() == "name is 'NVFP4', expected one of bf16, fp16, fp8_e4m3, fp8_e5m2, nvfp4");
  CHECK(format == LARDER_KV_FORMAT_FP8_E5M2);
  CHECK(larder_kv_format_name(LARDER_KV_FORMAT_FP16) == std::string("fp16"));
  CHECK(larder_kv_format_name(5) == std::string("UNKNOWN"));
  uint32_t value = 99;
  CHECK(larder_encoder_from_name(larder_encoder_name(LARDER_ENCODER_BEST_SCALE), &value) ==
        LARDER_OK);
  CHECK(value == LARDER_ENCODER_BEST_SCALE);
  CHECK(larder_key_transform_from_name("centred_rotated", &value) == LARDER_OK);
  CHECK(value == LARDER_KEY_TRANSFORM_CENTRED_ROTATED);
  CHECK(larder_mla_row_from_name("fp8_ds_mla", &value) == LARDER_OK);
  CHECK(value == LARDER_MLA_ROW_FP8_DS);
  CHECK(larder_layout_from_name("LBHNC", &value) == LARDER_OK);
  CHECK(value == LARDER_LAYOUT_LBHNC);
  CHECK(larder_dtype_from_name("e2m1x2", &value) == LARDER_OK);
  CHECK(value == LARDER_DTYPE_E2M1X2);
  CHECK(larder_dtype_name(LARDER_DTYPE_FP32) == std::string("fp32"));
  CHECK(larder_key_transform_name(4) == std::string("UNKNOWN"));
  CHECK(larder_mla_row_name(1) == std::string("nvfp4_ds_mla"));
  CHECK(larder_layout_name(0) == std::string("BLHNC"));
}

TEST_CASE("exceptions become codes with a sentence") {
  const auto thrown = [](auto exception) { return guarded([&]() -> Status { throw exception; }); };
  CHECK(thrown(std::bad_alloc()) == LARDER_RESOURCE_EXHAUSTED);
  CHECK(error() == "this process has no memory for the call");
  CHECK(thrown(std::length_error("vector")) == LARDER_RESOURCE_EXHAUSTED);
  CHECK(thrown(SystemError("mmap(4096 bytes)", ENOMEM)) == LARDER_RESOURCE_EXHAUSTED);
  CHECK(error_has("mmap(4096 bytes)"));
  CHECK(thrown(SystemError("open(x)", EMFILE)) == LARDER_RESOURCE_EXHAUSTED);
  CHECK(thrown(SystemError("send(fd 3)", EPIPE)) == LARDER_UNAVAILABLE);
  CHECK(thrown(SystemError("connect(x)", EACCES)) == LARDER_PERMISSION_DENIED);
  CHECK(thrown(SystemError("fstat(fd 3)", EBADF)) == LARDER_INTERNAL);
  CHECK(thrown(std::runtime_error("odd")) == LARDER_INTERNAL);
  CHECK(error() == "unexpected exception: odd");
  CHECK(thrown(7) == LARDER_INTERNAL);
  CHECK(error_has("unknown type"));
}

TEST_CASE("the sentence belongs to its thread and goes with the next call") {
  larder_dtype dtype = 0;
  CHECK(larder_dtype_from_name("int3", &dtype) == LARDER_INVALID_ARGUMENT);
  const std::string mine = error();
  std::thread([&] {
    CHECK(error().empty());
    CHECK(larder_dtype_from_name(nullptr, &dtype) == LARDER_INVALID_ARGUMENT);
    CHECK(error() == "name is NULL");
  }).join();
  CHECK(error() == mine);
  larder_client_destroy(nullptr);
  larder_pool_destroy(nullptr);
  larder_sequence_destroy(nullptr);
  CHECK(error() == mine);
  CHECK(larder_dtype_from_name("bf16", &dtype) == LARDER_OK);
  CHECK(error().empty());
}

TEST_CASE("the INIT macros say the defaults of the C++ API") {
  Arguments in;
  const AttendOptions attend = in.attend_options(nullptr);
  const AttendOptions expected;
  CHECK(attend.scale == expected.scale);
  CHECK(attend.causal == expected.causal);
  CHECK(attend.window_left == expected.window_left);
  CHECK(attend.soft_cap == expected.soft_cap);
  CHECK(attend.sinks.empty());
  CHECK(attend.alibi_slopes.empty());
  CHECK(attend.partial == expected.partial);
  CHECK(attend.num_splits == expected.num_splits);
  CHECK(attend.deterministic == expected.deterministic);
  CHECK(attend.shared_prefix_tokens == expected.shared_prefix_tokens);
  CHECK(attend.shard == expected.shard);
  CHECK(attend.lse_form == expected.lse_form);
  CHECK(attend.out_scale == expected.out_scale);
  CHECK(attend.out_sf_scale == expected.out_sf_scale);
  CHECK(attend.out_sf_first_row == expected.out_sf_first_row);
  CHECK(in.ok());
  const ClientOptions client;
  CHECK(defaults<larder_client_options>().deadline_us == client.deadline.count());
  CHECK(defaults<larder_client_options>().arena_bytes == client.arena_bytes);
  const PoolOptions pool;
  const auto c_pool = defaults<larder_pool_options>();
  CHECK(in.geometry(c_pool.geometry) == pool.geometry);
  CHECK(c_pool.encoder == static_cast<uint32_t>(pool.encoder));
  CHECK(c_pool.key_transform == static_cast<uint32_t>(pool.key_transform));
  CHECK(c_pool.layout == static_cast<uint32_t>(pool.layout));
  CHECK(c_pool.execution == static_cast<uint32_t>(pool.execution));
  CHECK(c_pool.opaque_block_bytes == pool.opaque_block_bytes);
  CHECK(c_pool.num_blocks == pool.num_blocks);
  CHECK(c_pool.max_blocks == pool.max_blocks);
  CHECK(c_pool.segment_bytes == pool.segment_bytes);
  CHECK(c_pool.group_name == nullptr);
  CHECK(c_pool.num_more_groups == 0);
  CHECK(c_pool.window_tokens == pool.window_tokens);
  const GroupOptions group;
  const auto c_group = defaults<larder_group_options>();
  CHECK(in.geometry(c_group.geometry) == group.geometry);
  CHECK(c_group.group_name == nullptr);
  CHECK(c_group.encoder == static_cast<uint32_t>(group.encoder));
  CHECK(c_group.key_transform == static_cast<uint32_t>(group.key_transform));
  CHECK(c_group.layout == static_cast<uint32_t>(group.layout));
  CHECK(c_group.num_blocks == group.num_blocks);
  CHECK(c_group.max_blocks == group.max_blocks);
  CHECK(c_group.window_tokens == group.window_tokens);
  CHECK(c_group.reserve_block_zero == 0);
  CHECK((c_pool.reserve_block_zero == 1) == pool.reserve_block_zero);
  CHECK(defaults<larder_merge_options>().out_scale == MergeOptions().out_scale);
}

TEST_CASE("a shorter struct is completed, a longer one refused only for what it says") {
  struct Longer {
    larder_attend_options known = LARDER_ATTEND_OPTIONS_INIT;
    uint64_t unknown = 0;
  } longer;
  const auto read = [&](size_t struct_size) {
    Arguments in;
    longer.known.struct_size = struct_size;
    const AttendOptions options = in.attend_options(&longer.known);
    return std::pair(options, in.status());
  };
  longer.known.scale = 0.5f;
  longer.known.causal = 0;
  longer.known.window_left = 7;
  longer.known.out_scale = 2.0f;
  // 16 bytes: struct_size, scale, causal.
  const auto [options, status] = read(16);
  CHECK(status.ok());
  CHECK(options.scale == 0.5f);
  CHECK_FALSE(options.causal);
  CHECK(options.window_left == -1);
  CHECK(options.out_scale == 1.0f);
  CHECK(read(sizeof(larder_attend_options)).first.out_scale == 2.0f);
  CHECK(read(sizeof longer).second.ok());
  CHECK(read(sizeof longer).first.window_left == 7);
  longer.unknown = 1;
  CHECK(read(sizeof longer).second.to_string() ==
        "INVALID_ARGUMENT: options: struct_size is 120, this library knows 112 bytes, and byte 112 "
        "is not 0");
  // What version 0.1.0 had; what lies behind it is not looked at.
  longer.known.deterministic = 7;
  longer.known.shard.num_ranks = -1;
  CHECK(read(88).second.ok());
  CHECK(read(88).first.out_scale == 2.0f);
  CHECK_FALSE(read(88).first.deterministic);
  CHECK(read(88).first.shard == ContextShard());
  for (const size_t wrong : {size_t{0}, size_t{7}, size_t{17}, size_t{1} << 20, SIZE_MAX}) {
    INFO(wrong);
    CHECK(read(wrong).second.code() == ErrorCode::kInvalidArgument);
    CHECK(read(wrong).second.message().find("struct_size is " + std::to_string(wrong)) !=
          std::string::npos);
  }
}

TEST_CASE("what a batch shares and what a rank holds reaches the C++ options") {
  larder_attend_options options = LARDER_ATTEND_OPTIONS_INIT;
  options.deterministic = 1;
  options.shared_prefix_tokens = -1;
  options.shard = {3, 2, 16};
  Arguments in;
  const AttendOptions read = in.attend_options(&options);
  CHECK(in.ok());
  CHECK(read.deterministic);
  CHECK(read.shared_prefix_tokens == kFindSharedPrefix);
  CHECK(read.shard == ContextShard{3, 2, 16});
}

TEST_CASE("numbers outside an enumeration, flags, reserved fields and bits are refused by name") {
  const auto refusal = [](auto change) {
    Arguments in;
    larder_attend_options options = LARDER_ATTEND_OPTIONS_INIT;
    larder_tensor tensor = LARDER_ZERO_TENSOR;
    larder_geometry geometry = defaults<larder_pool_options>().geometry;
    larder_paged_kv paged = LARDER_PAGED_KV_INIT;
    change(options, tensor, geometry, paged);
    (void)in.attend_options(&options);
    (void)in.tensor("q", &tensor);
    (void)in.geometry(geometry);
    (void)in.paged_kv(&paged);
    CHECK(in.status().code() == ErrorCode::kInvalidArgument);
    return in.status().message();
  };
  CHECK(refusal([](auto& o, auto&, auto&, auto&) { o.causal = -1; }) ==
        "causal is -1, expected 0 or 1");
  CHECK(refusal([](auto& o, auto&, auto&, auto&) { o.partial = 2; }) ==
        "partial is 2, expected 0 or 1");
  CHECK(refusal([](auto& o, auto&, auto&, auto&) { o.lse_form = 8; }) ==
        "lse_form is 8, expected bits of 7");
  CHECK(refusal([](auto& o, auto&, auto&, auto&) { o.reserved = 3; }) ==
        "options: reserved is 3, expected 0");
  CHECK(refusal([](auto& o, auto&, auto&, auto&) { o.reserved_2 = 3; }) ==
        "options: reserved is 3, expected 0");
  CHECK(refusal([](auto& o, auto&, auto&, auto&) { o.deterministic = 2; }) ==
        "deterministic is 2, expected 0 or 1");
  CHECK(refusal([](auto& o, auto&, auto&, auto&) {
          o.shard = {2, 2, 1};
        }) == "shard.rank is 2: expected 0 to 1 with shard.num_ranks 2");
  CHECK(refusal([](auto& o, auto&, auto&, auto&) {
          o.shard = {0, 0, 1};
        }) == "shard.num_ranks is 0: expected 1 or more");
  CHECK(refusal([](auto& o, auto&, auto&, auto&) { o.num_sinks = 2; }) ==
        "sinks with 2 entries is NULL");
  CHECK(refusal([](auto&, auto& t, auto&, auto&) { t.dtype = 5; }) ==
        "q: dtype is 5, expected 0 to 4 (bf16, fp16, fp32, fp8_e4m3, e2m1x2)");
  CHECK(refusal([](auto&, auto& t, auto&, auto&) { t.reserved = 1; }) ==
        "q: reserved is 1, expected 0");
  CHECK(refusal([](auto&, auto& t, auto&, auto&) {
          t = larder_dense_tensor(nullptr, LARDER_DTYPE_FP32, 1, 1, 1);
        }) == "q: data is NULL");
  CHECK(refusal([](auto&, auto&, auto& g, auto&) { g.k_format = 256; }).find("k_format is 256") ==
        0);
  CHECK(refusal([](auto&, auto&, auto& g, auto&) { g.v_format = 5; }).find("v_format is 5") == 0);
  CHECK(refusal([](auto&, auto&, auto& g, auto&) { g.mla_row = 5; }).find("mla_row is 5") == 0);
  CHECK(refusal([](auto&, auto&, auto&, auto& p) { p.v_scale_order = 2; }) ==
        "v_scale_order is 2, expected 0 to 1 (linear, swizzled)");
}

TEST_CASE("arrays that cannot be are refused") {
  const int64_t slots[2] = {0, 1};
  const auto refusal = [](auto read) {
    Arguments in;
    read(in);
    return in.status().message();
  };
  CHECK(refusal([&](Arguments& in) { CHECK(in.array("slots", slots, 2).size() == 2); }).empty());
  CHECK(refusal([&](Arguments& in) { in.array("slots", (const int64_t*)nullptr, 0); }).empty());
  CHECK(refusal([&](Arguments& in) { in.array("slots", slots, SIZE_MAX / 8); }) ==
        "slots with 2305843009213693951 entries passes 2^63 bytes");
  const auto* crooked = reinterpret_cast<const int64_t*>(reinterpret_cast<const char*>(slots) + 1);
  CHECK(refusal([&](Arguments& in) { in.array("slots", crooked, 1); }) ==
        "slots is not aligned to 8 bytes");
  CHECK(refusal([&](Arguments& in) { in.array("slots", slots, -1, 2); }).find("-1 rows") !=
        std::string::npos);
  CHECK(refusal([&](Arguments& in) {
          in.array("slots", slots, std::numeric_limits<int64_t>::max(), 2);
        }).find("2^63") != std::string::npos);
  CHECK(refusal([&](Arguments& in) {
          in.refuse("the first");
          in.refuse("the second");
        }) == "the first");
}

TEST_CASE("no daemon at the path is UNAVAILABLE, and the handle NULL") {
  larder_client_options options = LARDER_CLIENT_OPTIONS_INIT;
  options.socket_path = "/nonexistent/larderd.sock";
  auto* client = reinterpret_cast<larder_client*>(8);
  CHECK(larder_connect(&options, &client) == LARDER_UNAVAILABLE);
  CHECK(error_has("/nonexistent/larderd.sock"));
  CHECK(client == nullptr);
  options.deadline_us = 0;
  CHECK(larder_connect(&options, &client) == LARDER_INVALID_ARGUMENT);
  CHECK(error_has("deadline is 0 us"));
  options.deadline_us = std::numeric_limits<int64_t>::min();
  CHECK(larder_connect(&options, &client) == LARDER_INVALID_ARGUMENT);
}

TEST_CASE("a failing system call of this process is a code, not an exception") {
  rlimit old = {};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &old) == 0);
  larder_client_options options = LARDER_CLIENT_OPTIONS_INIT;
  options.socket_path = "/nonexistent/larderd.sock";
  larder_client* client = nullptr;
  const rlimit none = {0, old.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &none) == 0);
  const larder_code code = larder_connect(&options, &client);
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &old) == 0);
  CHECK(code == LARDER_RESOURCE_EXHAUSTED);
  CHECK(error_has("socket"));
}

TEST_CASE("a page's regions follow one another") {
  larder_geometry geometry = defaults<larder_pool_options>().geometry;
  geometry.num_layers = geometry.num_kv_heads = 1;
  geometry.block_tokens = 16;
  geometry.k_dim = geometry.v_dim = 64;
  larder_page_layout page = {};
  CHECK(larder_geometry_page_layout(&geometry, &page) == LARDER_OK);
  // nvfp4: 32 bytes of pairs and 4 scale bytes a row.
  CHECK(page.k_data_offset_bytes == 0);
  CHECK(page.k_scale_offset_bytes == 512);
  CHECK(page.v_data_offset_bytes == 576);
  CHECK(page.v_scale_offset_bytes == 1088);
  CHECK(page.page_bytes == 1152);
  geometry.k_dim = 0;
  CHECK(larder_geometry_page_layout(&geometry, &page) == LARDER_INVALID_ARGUMENT);
  CHECK(error_has("k_dim"));
  CHECK(page.page_bytes == 1152);
}

TEST_CASE("dense tensors and MLA geometries are filled in") {
  float data = 0;
  const larder_tensor tensor = larder_dense_tensor(&data, LARDER_DTYPE_FP16, 3, 4, 5);
  CHECK(tensor.data == &data);
  CHECK(tensor.dtype == LARDER_DTYPE_FP16);
  CHECK(tensor.shape[0] == 3);
  CHECK(tensor.strides[0] == 20);
  CHECK(tensor.strides[1] == 5);
  CHECK(tensor.strides[2] == 1);
  larder_geometry geometry = {};
  CHECK(larder_mla_geometry(7, 64, LARDER_MLA_ROW_FP8_DS, &geometry) == LARDER_OK);
  CHECK(geometry.num_layers == 7);
  CHECK(geometry.num_kv_heads == 1);
  CHECK(geometry.block_tokens == 64);
  CHECK(geometry.k_dim == 576);
  CHECK(geometry.v_dim == 512);
  CHECK(geometry.mla_row == LARDER_MLA_ROW_FP8_DS);
  CHECK(larder_mla_geometry(7, 64, 5, &geometry) == LARDER_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace larder::c_api
