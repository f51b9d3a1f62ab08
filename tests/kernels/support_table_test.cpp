// The README's table of what is served, compared with what the kernel tables say they serve.
#include <algorithm>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include <doctest/doctest.h>

#include "kernels/kernel_table.h"

namespace larder::kernels {
namespace {

// op, K format, V format, dim multiple, largest dim, backend.
using Line = std::tuple<std::string, std::string, std::string, int, int, std::string>;

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) {
    const auto first = part.find_first_not_of(" `");
    const auto last = part.find_last_not_of(" `");
    parts.push_back(first == std::string::npos ? "" : part.substr(first, last - first + 1));
  }
  return parts;
}

// "any" is 1 to 1024; "up to N" starts at 1; "multiples of M up to N".
std::pair<int, int> parse_dims(const std::string& text) {
  std::smatch match;
  if (std::regex_match(text, match, std::regex("multiples of ([0-9]+) up to ([0-9]+).*")))
    return {std::stoi(match[1]), std::stoi(match[2])};
  REQUIRE_MESSAGE(std::regex_match(text, match, std::regex("up to ([0-9]+).*")), text);
  return {1, std::stoi(match[1])};
}

// The rows of the table with this header, each for every op and pair of formats that it names.
std::set<Line> lines_of_readme() {
  std::ifstream file(LARDER_README);
  REQUIRE(file.is_open());
  std::set<Line> lines;
  bool inside = false;
  for (std::string text; std::getline(file, text);) {
    if (text.starts_with("| op | K formats | V formats | dims | backend |")) {
      inside = true;
    } else if (inside && !text.starts_with("|")) {
      inside = false;
    } else if (inside && !text.starts_with("|--")) {
      const auto cells = split(text.substr(1), '|');
      REQUIRE_MESSAGE(cells.size() == 5, text);
      const auto [multiple, largest] = parse_dims(cells[3]);
      for (const std::string& op : split(cells[0], ','))
        for (const std::string& k : split(cells[1], ',')) {
          const auto v_formats = cells[2] == "the same" ? std::vector{k} : split(cells[2], ',');
          for (const std::string& v : v_formats)
            for (const std::string& backend : split(cells[4], ','))
              CHECK_MESSAGE(lines.emplace(op, k, v, multiple, largest, backend).second,
                            "named twice: ", op, " ", k, " ", v, " ", backend);
        }
    }
  }
  return lines;
}

TEST_CASE("the support table of the README is what the kernel tables serve") {
  const std::set<Line> stated = lines_of_readme();
  std::set<Line> served;
  for (const Capability& line : capabilities())
    served.emplace(line.op, line.k_format, line.v_format, line.dim_multiple, line.dim_max,
                   line.backend);
  const auto show = [](const Line& line) {
    return std::get<0>(line) + " " + std::get<1>(line) + " " + std::get<2>(line) + " " +
           std::to_string(std::get<3>(line)) + " " + std::to_string(std::get<4>(line)) + " " +
           std::get<5>(line);
  };
  for (const Line& line : served)
    CHECK_MESSAGE(stated.contains(line), "served, but not in the README: ", show(line));
  const bool has_cuda = std::any_of(served.begin(), served.end(),
                                    [](const Line& line) { return std::get<5>(line) == "cuda"; });
  for (const Line& line : stated)
    if (std::get<5>(line) != "cuda" || has_cuda)  // a build without nvcc has none of them
      CHECK_MESSAGE(served.contains(line), "in the README, but not served: ", show(line));
}

}  // namespace
}  // namespace larder::kernels
