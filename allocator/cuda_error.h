// CudaError: a failed call of the CUDA driver: thrown with the call, its sizes and the driver's
// code; caught where a SystemError is.
#pragma once

#include <stdexcept>
#include <string>

namespace larder {

class CudaError : public std::runtime_error {
 public:
  // `function` is the entry point, `arguments` what it was given in words: ("cuMemCreate",
  // "2097152 bytes on GPU-...", 2, "CUDA_ERROR_OUT_OF_MEMORY").
  CudaError(const std::string& function, const std::string& arguments, int code,
            const std::string& code_name)
      : std::runtime_error(function + "(" + arguments + "): " + code_name + " (" +
                           std::to_string(code) + ")"),
        function_(function),
        code_(code),
        code_name_(code_name) {}

  const std::string& function() const { return function_; }
  int code() const { return code_; }                           // a CUresult
  const std::string& code_name() const { return code_name_; }  // "CUDA_ERROR_..."
  bool is_out_of_memory() const { return code_ == kOutOfMemory; }

 private:
  static constexpr int kOutOfMemory = 2;  // CUDA_ERROR_OUT_OF_MEMORY

  std::string function_;
  int code_;
  std::string code_name_;
};

}  // namespace larder
