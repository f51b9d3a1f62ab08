// What each format costs the real engine on a real text, measured through real pools: bits per byte
// against reference figures, and which ideas are better than which.
#include <cmath>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/node.h"

namespace larder::test {
namespace {

const std::string kModel = std::string(LARDER_TEST_DATA) + "/tiny-lm";
// Held-out text that is not ours to copy; a user's clone does not have it.
const std::string kSampleText =
    std::string(LARDER_TEST_DATA) + "/../../../shared/models/sample.txt";

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSlow = true;
#else
constexpr bool kSlow = false;
#endif

bool text_is_missing() {
  if (std::filesystem::exists(kSampleText)) return false;
  MESSAGE("skipped: there is no ", kSampleText);
  return true;
}

// Bits per byte of each window.
std::vector<double> score(const Node& node, const std::vector<std::string>& options,
                          size_t num_windows) {
  std::vector<std::string> argv = {program("larder-generate"),
                                   "--model",
                                   kModel,
                                   "--socket",
                                   node.socket(),
                                   "--json",
                                   "--score",
                                   kSampleText,
                                   "--windows",
                                   std::to_string(num_windows)};
  argv.insert(argv.end(), options.begin(), options.end());
  const Output output = run(argv);
  INFO(output.stderr_text);
  REQUIRE(output.exit_code == 0);
  const auto result = nlohmann::json::parse(output.stdout_text);
  return result["bits_per_byte_each"].get<std::vector<double>>();
}

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

// A last bit that differs in a product flips 4-bit codes, and where two candidates compete the
// scale with them. That moves one window up or down (largest seen: nvfp4 0.15 %, four over six 0.29
// %); it does not move the mean of ten.
double one_window_tolerance(const std::string& format) {
  if (format == "nvfp4_4over6") return 0.004;
  return format.find("nvfp4") == std::string::npos ? 0.001 : 0.002;
}

TEST_CASE("bits per byte of every format are the reference's within 0.1 %") {
  if (text_is_missing()) return;
  Node node;
  const auto windows = nlohmann::json::parse(read_file(kModel + "/reference.json"))["windows"];
  const std::map<std::string, std::vector<std::string>> options_of = {
      {"bf16", {"--format", "bf16"}},
      {"fp8_e4m3", {"--format", "fp8_e4m3"}},
      {"nvfp4", {"--format", "nvfp4"}},
      {"nvfp4_4over6", {"--format", "nvfp4", "--encoder", "four_over_six"}},
      {"fp8_e4m3 K, nvfp4 V", {"--k-format", "fp8_e4m3", "--v-format", "nvfp4"}}};
  CHECK(windows.size() == options_of.size());
  const size_t count = kSlow ? 1 : 10;
  for (const auto& entry : windows.items()) {
    const std::string& format = entry.key();
    std::vector<std::string> options = options_of.at(format);
    options.insert(options.end(), {"--execution", "on-request"});
    const std::vector<double> each = score(node, options, count);
    REQUIRE(each.size() == count);
    std::vector<double> wanted = entry.value()["bits_per_byte_each"];
    wanted.resize(count);
    for (size_t i = 0; i < count; ++i) {
      INFO(format, " window ", i, ": ", each[i], " for ", wanted[i]);
      CHECK(std::abs(each[i] / wanted[i] - 1) < one_window_tolerance(format));
    }
    INFO(format, " mean: ", mean(each), " for ", mean(wanted));
    if (!kSlow) CHECK(std::abs(mean(each) / mean(wanted) - 1) < 0.001);
  }
}

// The order of the table "same bytes, same readers, less loss" of the format study: what stands
// further down costs less. Ideas whose figures there lie within 0.1 points share a line.
TEST_CASE("better encoders and key transforms cost less, in the order of the study") {
  if (text_is_missing() || kSlow) return;
  Node node;
  const std::string keys = node.folder_file("keys.safetensors");
  const std::string offsets = node.folder_file("offsets.safetensors");
  constexpr size_t kWindows = 16;
  // Calibrated on other windows than those that are scored.
  (void)score(node, {"--format", "bf16", "--first-window", "100", "--dump-keys", keys}, 8);
  const Output calibrated = run({program("larderctl"), "calibrate", keys, "-o", offsets});
  INFO(calibrated.stderr_text);
  REQUIRE(calibrated.exit_code == 0);

  const double plain = mean(score(node, {"--format", "bf16"}, kWindows));
  const auto loss = [&](const std::string& encoder, const std::string& transform) {
    std::vector<std::string> options = {"--format", "nvfp4",           "--encoder",
                                        encoder,    "--key-transform", transform};
    if (transform.starts_with("centred")) options.insert(options.end(), {"--key-offsets", offsets});
    const double percent = 100 * (mean(score(node, options, kWindows)) / plain - 1);
    MESSAGE(encoder, ", ", transform, ": ", percent, " %");
    return percent;
  };
  const std::vector<std::vector<double>> lines = {
      {loss("reference", "none")},
      {loss("four_over_six", "none"), loss("reference", "centred"), loss("reference", "rotated")},
      {loss("best_scale", "none")},
      {loss("reference", "centred_rotated")},
      {loss("best_scale", "centred")},
      {loss("best_scale", "centred_rotated")}};
  for (size_t line = 1; line < lines.size(); ++line)
    for (const double better : lines[line])
      for (const double worse : lines[line - 1]) CHECK(better < worse);
  // Half of the loss and more is gone at the same bytes.
  CHECK(lines.back()[0] < 0.5 * lines.front()[0]);
}

}  // namespace
}  // namespace larder::test
