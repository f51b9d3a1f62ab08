#include "client/examples/generate_options.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <functional>
#include <iostream>

#include <CLI/CLI.hpp>

namespace larder::examples {
namespace {

constexpr int kExitUsage = 2;
constexpr int32_t kMaxNewTokens = 1 << 20;
constexpr int32_t kMaxPrefillRows = 1 << 14;
constexpr int32_t kMaxPauseMs = 60'000;
constexpr int32_t kMaxBlockTokensOption = 4096;
constexpr int64_t kMaxBlocksOption = int64_t{1} << 31;
constexpr int64_t kMaxWindows = 1 << 20;
constexpr size_t kMaxPrompts = 64;
constexpr std::array<std::string_view, 2> kExecutionNames = {"in-process", "on-request"};

// An option whose values are the names of an enum, in the enum's order.
template <typename Enum, size_t size>
CLI::Option* add_enum_option(CLI::App& app, const std::string& option,
                             const std::array<std::string_view, size>& names,
                             const std::string& help, std::function<void(Enum)> assign) {
  const std::vector<std::string> values(names.begin(), names.end());
  return app
      .add_option_function<std::string>(
          option,
          [values, assign](const std::string& text) {
            const auto found = std::find(values.begin(), values.end(), text);
            assign(static_cast<Enum>(found - values.begin()));
          },
          help)
      ->check(CLI::IsMember(values));
}

void add_format_options(CLI::App& app, Options& options) {
  const auto set_both = [&options](KvFormat format) {
    options.k_format = options.v_format = format;
  };
  // At once, so that --k-format and --v-format overrule it wherever they stand.
  add_enum_option<KvFormat>(app, "--format", kKvFormatNames, "keys and values; default nvfp4",
                            set_both)
      ->trigger_on_parse();
  add_enum_option<KvFormat>(app, "--k-format", kKvFormatNames, "keys",
                            [&options](KvFormat format) { options.k_format = format; });
  add_enum_option<KvFormat>(app, "--v-format", kKvFormatNames, "values",
                            [&options](KvFormat format) { options.v_format = format; });
  add_enum_option<Encoder>(app, "--encoder", kEncoderNames,
                           "search for the nvfp4 scales; default reference",
                           [&options](Encoder encoder) { options.encoder = encoder; });
  add_enum_option<KeyTransform>(
      app, "--key-transform", kKeyTransformNames, "done to keys before they are stored",
      [&options](KeyTransform transform) { options.key_transform = transform; });
  app.add_option("--key-offsets", options.key_offsets_path,
                 "file of `larderctl calibrate`, for the centred transforms");
}

void add_pool_options(CLI::App& app, Options& options) {
  app.add_option("--socket", options.client.socket_path,
                 "the daemon's socket; default $LARDER_SOCKET, else /run/larder/larderd.sock");
  app.add_option("--tenant", options.client.tenant, "tenant; its token is read from $LARDER_TOKEN")
      ->capture_default_str();
  app.add_option("--pool", options.pool_name, "pool name; default MODEL-FORMAT");
  add_enum_option<Execution>(
      app, "--execution", kExecutionNames,
      "who runs append and attend: this process (default), or the daemon's executor",
      [&options](Execution execution) { options.execution = execution; });
  app.add_option("--device", options.device,
                 "whose memory the pool is: host, auto (a GPU where larderd finds one), or a GPU's "
                 "UUID; default: as larderd is configured. In process the model runs on a pool's "
                 "GPU too, in float32; else on the CPU");
  app.add_flag("--graph,!--no-graph", options.graph,
               "on a GPU: decode by replaying a CUDA graph (default), or kernel by kernel");
  app.add_option("--block-tokens", options.block_tokens, "tokens of a block")
      ->check(CLI::Range(1, kMaxBlockTokensOption))
      ->capture_default_str();
  app.add_option("--num-blocks", options.num_blocks, "blocks of the pool")
      ->check(CLI::Range(int64_t{1}, kMaxBlocksOption))
      ->capture_default_str();
}

void add_work_options(CLI::App& app, Options& options) {
  app.add_option("--prompt", options.prompts, "text to go on from; may be given several times")
      ->allow_extra_args(false);
  app.add_option("--max-tokens", options.generate.max_tokens, "new bytes per prompt")
      ->check(CLI::Range(1, kMaxNewTokens))
      ->capture_default_str();
  app.add_option("--prefill-rows", options.generate.prefill_rows, "tokens of one prefill pass")
      ->check(CLI::Range(1, kMaxPrefillRows))
      ->capture_default_str();
  app.add_flag_callback(
      "--no-prefix", [&options] { options.generate.reuse_prefix = false; },
      "neither start from published blocks nor publish");
  app.add_option("--score", options.score_path, "print the bits per byte of this text instead");
  app.add_option("--windows", options.num_windows, "windows of the model's context to score")
      ->check(CLI::Range(int64_t{1}, kMaxWindows))
      ->capture_default_str();
  app.add_option("--first-window", options.first_window, "the first window to score")
      ->check(CLI::Range(int64_t{0}, kMaxWindows))
      ->capture_default_str();
  app.add_option("--dump-keys", options.dump_keys_path,
                 "with --score: write the text's keys there, for `larderctl calibrate`");
  app.add_option("--dump-attention", options.dump_attention_path,
                 "with --score: write the text's queries, keys and values there, in bf16");
  app.add_flag("--poke", options.poke,
               "after the prefill, damage one byte of the pool from a second connection; the text "
               "changes (implies --no-prefix, so that no published block is damaged)");
  app.add_flag("--checksum", options.checksum,
               "instead of generating, print block id and checksum of each published block of the "
               "prompt");
  app.add_option("--pause-ms", options.pause_ms,
                 "sleep so long after each token, to have time to look (or to kill something)")
      ->check(CLI::Range(0, kMaxPauseMs))
      ->capture_default_str();
  app.add_flag_callback(
      "--no-stream", [&options] { options.stream = false; }, "print each text when it is complete");
  app.add_flag("--quiet", options.quiet, "no summary on stderr");
  app.add_flag("--json", options.json, "one JSON object on stdout");
}

std::string usage_error(const Options& options) {
  if (options.prompts.empty() == options.score_path.empty())
    return "give either --prompt or --score";
  if (options.prompts.size() > kMaxPrompts)
    return "--prompt is given " + std::to_string(options.prompts.size()) + " times, at most " +
           std::to_string(kMaxPrompts);
  if (options.poke && options.prompts.empty()) return "--poke needs --prompt";
  if (options.checksum && options.prompts.size() != 1) return "--checksum needs one --prompt";
  if (options.checksum && (options.poke || options.json))
    return "--checksum goes neither with --poke nor with --json";
  if (!options.dump_keys_path.empty() && options.score_path.empty())
    return "--dump-keys needs --score";
  if (!options.dump_attention_path.empty() && options.score_path.empty())
    return "--dump-attention needs --score";
  if (!options.dump_keys_path.empty() && !options.dump_attention_path.empty())
    return "give either --dump-keys or --dump-attention, whose file has the keys too";
  if (is_centred(options.key_transform) == options.key_offsets_path.empty())
    return "--key-offsets goes with the centred key transforms, and they need it";
  return "";
}

}  // namespace

ParsedOptions parse_options(int argc, const char* const* argv) {
  ParsedOptions parsed;
  Options& options = parsed.options;
  CLI::App app(
      "Generates text with a byte-level Llama-style model whose KV cache is a Larder pool.",
      "larder-generate");
  app.set_version_flag("--version", LARDER_VERSION);
  app.add_option("--model", options.model_directory, "folder with config.json and safetensors")
      ->required();
  add_pool_options(app, options);
  add_format_options(app, options);
  add_work_options(app, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    parsed.exit_code = app.exit(error) == 0 ? 0 : kExitUsage;
    return parsed;
  }
  if (const std::string message = usage_error(options); !message.empty()) {
    std::cerr << message << "\nRun with --help for more information.\n";
    parsed.exit_code = kExitUsage;
    return parsed;
  }
  options.client.name = "larder-generate";
  if (const char* token = std::getenv("LARDER_TOKEN")) options.client.token = token;
  if (options.poke) options.generate.reuse_prefix = false;
  parsed.run = true;
  return parsed;
}

}  // namespace larder::examples
