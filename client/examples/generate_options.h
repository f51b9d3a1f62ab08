// The command line of larder-generate.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "client/examples/generate.h"
#include "larder/client.h"

namespace larder::examples {

struct Options {
  std::string model_directory;
  ClientOptions client;
  std::string pool_name;  // empty: named after the model and the formats
  KvFormat k_format = KvFormat::kNvfp4;
  KvFormat v_format = KvFormat::kNvfp4;
  Encoder encoder = Encoder::kReference;
  KeyTransform key_transform = KeyTransform::kNone;
  std::string key_offsets_path;  // for the centred transforms
  Execution execution = Execution::kInProcess;
  std::string device;  // of the pool's memory: "host", "auto" or a UUID; empty: as larderd says
  bool graph = true;   // on a GPU
  int32_t block_tokens = 16;
  int64_t num_blocks = 512;
  GenerateOptions generate;
  std::vector<std::string> prompts;
  std::string score_path;  // not empty: score instead of generating
  int64_t first_window = 0;
  int64_t num_windows = 10;
  std::string dump_keys_path;       // not empty: the keys of the scored text go there
  std::string dump_attention_path;  // not empty: its queries, keys and values go there
  bool poke = false;
  bool checksum = false;  // of the prompts' published blocks, instead of generating
  int32_t pause_ms = 0;   // after each token
  bool stream = true;
  bool quiet = false;
  bool json = false;
};

// What main does next: run, or leave with this exit code (help, or a usage error, both printed).
struct ParsedOptions {
  Options options;
  bool run = false;
  int exit_code = 0;
};
ParsedOptions parse_options(int argc, const char* const* argv);

}  // namespace larder::examples
