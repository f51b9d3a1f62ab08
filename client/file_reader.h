// A regular file that is read by offset. It is read, not mapped: a file that shrinks under a
// mapping kills the process, and a model file belongs to somebody else.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include <nlohmann/json_fwd.hpp>

#include "larder/own_fd.h"
#include "larder/status.h"

namespace larder {

class FileReader {
 public:
  // NOT_FOUND, PERMISSION_DENIED, or INVALID_ARGUMENT for something that is not a regular file.
  static Result<FileReader> open(const std::filesystem::path& path);

  const std::string& path() const { return path_; }
  int64_t size_bytes() const { return size_bytes_; }  // at the time of open
  // Fills `out` from `offset_bytes`. INVALID_ARGUMENT if the file ends before.
  Status read(int64_t offset_bytes, std::span<char> out) const;

 private:
  FileReader(OwnFd fd, std::string path, int64_t size_bytes)
      : fd_(std::move(fd)), path_(std::move(path)), size_bytes_(size_bytes) {}

  OwnFd fd_;
  std::string path_;
  int64_t size_bytes_ = 0;
};

// INVALID_ARGUMENT with the position of the first error. `what` names the text in the message.
Result<nlohmann::json> parse_json(const std::string& text, const std::string& what);

// A whole JSON file of at most size_bytes_max bytes.
Result<nlohmann::json> read_json_file(const std::filesystem::path& path, int64_t size_bytes_max);

}  // namespace larder
