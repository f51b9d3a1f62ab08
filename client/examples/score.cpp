#include "client/examples/score.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
#include <vector>

#include "client/file_reader.h"

namespace larder::examples {
namespace {

// -log2 of the probability that the logits of `row` give to `token`.
double bits_of(const Matrix& logits, Eigen::Index row, int32_t token) {
  const double largest = logits.row(row).maxCoeff();
  double sum = 0;
  for (Eigen::Index i = 0; i < logits.cols(); ++i) sum += std::exp(logits(row, i) - largest);
  return (std::log(sum) + largest - logits(row, token)) / std::numbers::ln2;
}

}  // namespace

Result<std::string> read_windows(const std::filesystem::path& path, int64_t first_window,
                                 int64_t num_windows, int32_t context_tokens) {
  const auto file = FileReader::open(path);
  if (!file) return file.status();
  const int64_t available = std::max<int64_t>(0, file->size_bytes() - 1) / context_tokens;
  if (first_window + num_windows > available)
    return Status(ErrorCode::kInvalidArgument,
                  file->path() + " has " + std::to_string(file->size_bytes()) + " bytes, " +
                      std::to_string(available) + " windows of " + std::to_string(context_tokens) +
                      " tokens; windows " + std::to_string(first_window) + " to " +
                      std::to_string(first_window + num_windows - 1) + " were asked for");
  std::string text(static_cast<size_t>(num_windows * context_tokens + 1), '\0');
  if (Status status = file->read(first_window * context_tokens, text); !status.ok()) return status;
  return text;
}

Result<double> score_window(ModelRunner& runner, std::string_view window, int32_t prefill_rows,
                            AttentionDump* dump) {
  LARDER_CHECK(window.size() >= 2 && prefill_rows >= 1, window.size(), prefill_rows);
  std::vector<int32_t> tokens;
  for (const char c : window) tokens.push_back(static_cast<uint8_t>(c));
  const size_t num_predictions = tokens.size() - 1;
  std::vector<int32_t> all_rows(static_cast<size_t>(prefill_rows));
  std::iota(all_rows.begin(), all_rows.end(), 0);

  Sequence sequence = runner.pool().begin_sequence();
  double bits = 0;
  for (size_t first = 0; first < num_predictions; first += static_cast<size_t>(prefill_rows)) {
    const size_t rows = std::min(static_cast<size_t>(prefill_rows), num_predictions - first);
    Batch batch;
    if (Status status = batch.add(sequence, std::span(tokens).subspan(first, rows)); !status.ok())
      return status;
    const auto logits = runner.forward(batch, std::span(all_rows).first(rows), dump);
    if (!logits) return logits.status();
    for (size_t i = 0; i < rows; ++i)
      bits += bits_of(*logits, static_cast<Eigen::Index>(i), tokens[first + i + 1]);
  }
  if (Status status = sequence.end(); !status.ok()) return status;
  return bits / static_cast<double>(num_predictions);
}

}  // namespace larder::examples
