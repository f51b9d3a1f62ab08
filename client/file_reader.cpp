#include "client/file_reader.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>

#include "larder/system_error.h"

namespace larder {

Result<FileReader> FileReader::open(const std::filesystem::path& path) {
  const std::string text = path.string();
  // O_NONBLOCK: opening a pipe that nobody writes must not wait; regular files ignore it.
  OwnFd fd(::open(text.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) {
    const int error = errno;
    if (error == ENOENT || error == ENOTDIR)
      return Status(ErrorCode::kNotFound, text + " does not exist");
    if (error == EACCES || error == EPERM)
      return Status(ErrorCode::kPermissionDenied, text + " may not be read by this user");
    if (error == ENAMETOOLONG || error == ELOOP)
      return Status(ErrorCode::kInvalidArgument, text + " is not a usable path");
    throw SystemError("open(" + text + ")", error);
  }
  struct stat info = {};
  if (::fstat(fd.get(), &info) != 0) throw SystemError("fstat(" + text + ")");
  if (!S_ISREG(info.st_mode))
    return Status(ErrorCode::kInvalidArgument, text + " is not a regular file");
  return FileReader(std::move(fd), text, info.st_size);
}

Status FileReader::read(int64_t offset_bytes, std::span<char> out) const {
  size_t done_bytes = 0;
  while (done_bytes < out.size()) {
    const ssize_t got = ::pread(fd_.get(), out.data() + done_bytes, out.size() - done_bytes,
                                offset_bytes + static_cast<int64_t>(done_bytes));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0)
      throw SystemError("pread(" + path_ + ", " + std::to_string(out.size()) + " bytes at " +
                        std::to_string(offset_bytes) + ")");
    if (got == 0)
      return Status(ErrorCode::kInvalidArgument,
                    path_ + " ends at byte " +
                        std::to_string(offset_bytes + static_cast<int64_t>(done_bytes)) + ": " +
                        std::to_string(out.size()) + " bytes at " + std::to_string(offset_bytes) +
                        " were wanted");
    done_bytes += static_cast<size_t>(got);
  }
  return {};
}

Result<nlohmann::json> parse_json(const std::string& text, const std::string& what) {
  try {
    return nlohmann::json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    return Status(ErrorCode::kInvalidArgument, what + " is not JSON: " + error.what());
  }
}

Result<nlohmann::json> read_json_file(const std::filesystem::path& path, int64_t size_bytes_max) {
  auto file = FileReader::open(path);
  if (!file) return file.status();
  if (file->size_bytes() > size_bytes_max)
    return Status(ErrorCode::kInvalidArgument,
                  file->path() + " has " + std::to_string(file->size_bytes()) + " bytes, at most " +
                      std::to_string(size_bytes_max) + " are read");
  std::string text(static_cast<size_t>(file->size_bytes()), '\0');
  if (Status status = file->read(0, text); !status.ok()) return status;
  return parse_json(text, file->path());
}

}  // namespace larder
