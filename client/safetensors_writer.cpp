#include "client/safetensors_writer.h"

#include <array>
#include <cerrno>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "larder/check.h"
#include "larder/own_fd.h"
#include "larder/system_error.h"

namespace larder {
namespace {

constexpr std::array<const char*, 3> kTypeNames = {"BF16", "F16", "F32"};

// The header's length in eight bytes, then the header, padded so that the data is aligned.
std::string make_header(std::span<const TensorToWrite> tensors) {
  nlohmann::json header = nlohmann::json::object();
  size_t offset = 0;
  for (const TensorToWrite& tensor : tensors) {
    int64_t elements = 1;
    for (const int64_t size : tensor.shape) elements *= size;
    LARDER_CHECK(static_cast<int64_t>(tensor.bytes.size()) == elements * dtype_bytes(tensor.dtype),
                 tensor.name, tensor.bytes.size());
    header[tensor.name] = {{"dtype", kTypeNames.at(static_cast<size_t>(tensor.dtype))},
                           {"shape", tensor.shape},
                           {"data_offsets", {offset, offset + tensor.bytes.size()}}};
    offset += tensor.bytes.size();
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  std::string length(8, '\0');
  for (size_t i = 0; i < length.size(); ++i)
    length[i] = static_cast<char>(uint64_t{text.size()} >> (8 * i) & 0xFF);
  return length + text;
}

void write_all(int fd, const std::string& path, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t size = ::write(fd, bytes.data(), bytes.size());
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) throw SystemError("write(" + path + ")");
    bytes = bytes.subspan(static_cast<size_t>(size));
  }
}

}  // namespace

void write_safetensors(const std::filesystem::path& path, std::span<const TensorToWrite> tensors) {
  constexpr mode_t kMode = 0644;
  std::string name = path.string() + ".XXXXXX";
  OwnFd file(::mkostemp(name.data(), O_CLOEXEC));
  if (!file.valid()) throw SystemError("mkostemp(" + name + ")");
  try {
    const std::string header = make_header(tensors);
    write_all(file.get(), name, std::as_bytes(std::span(header)));
    for (const TensorToWrite& tensor : tensors) write_all(file.get(), name, tensor.bytes);
    if (::fchmod(file.get(), kMode) != 0) throw SystemError("fchmod(" + name + ")");
    if (::rename(name.c_str(), path.c_str()) != 0)
      throw SystemError("rename(" + name + ", " + path.string() + ")");
  } catch (...) {
    ::unlink(name.c_str());
    throw;
  }
}

}  // namespace larder
