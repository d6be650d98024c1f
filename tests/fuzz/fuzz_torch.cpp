// SPDX-License-Identifier: Apache-2.0
// Files of torch.save, in both formats: a file is refused, or every byte of every tensor in it can be read.

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>

#include "muster/error.hpp"
#include "src/checkpoint/thirdparty/checkpoint.hpp"

using namespace muster;

namespace {

/// A file without a name, reused for each input.
class MemoryFile {
 public:
  MemoryFile() : fd_(::memfd_create("fuzz", MFD_CLOEXEC)), path_("/proc/self/fd/" + std::to_string(fd_)) {
    if (fd_ < 0) std::abort();
  }
  const std::string& holding(std::span<const std::uint8_t> bytes) const {
    if (::ftruncate(fd_, 0) != 0 || ::pwrite(fd_, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
      std::abort();
    return path_;
  }

 private:
  int fd_;
  std::string path_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const MemoryFile file;
  try {
    const auto found = thirdparty::find_checkpoint(file.holding({data, size}));
    if (!found) return 0;
    std::vector<std::string> notes;
    const auto tensors = open_checkpoint(*found, 0, {}, notes);
    std::vector<std::byte> memory;
    for (std::size_t i = 0; i < tensors->tensors().size(); ++i) {
      // Compressed input can expand to at most 1024 times its size.
      if (tensors->tensors()[i].bytes > 1024 * 1024 + 1024 * size) std::abort();
      tensors->read_piece(i, 0, tensors->tensors()[i].bytes, memory);
    }
  } catch (const Error& error) {
    const bool is_expected = error.kind() == ErrorKind::corrupt || error.kind() == ErrorKind::unsupported ||
                             error.kind() == ErrorKind::not_found || error.kind() == ErrorKind::argument;
    if (!is_expected) std::abort();
  }
  return 0;
}
