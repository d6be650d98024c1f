// SPDX-License-Identifier: Apache-2.0
// Reports of muster-hdf5-reader, as whoever has taken it over might write them: one is read or refused, and what is
// shown of it can be read from a file of 4096 bytes, whose chunks decode or are refused.

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "src/inspect/chunked_reader.hpp"
#include "src/inspect/foreign_report.hpp"

using namespace muster;
using namespace muster::inspect;

namespace {

constexpr std::uint64_t file_bytes = 4096;
// What one input may make work of.
constexpr std::uint64_t most_read = 1 << 16;

/// Zeros, then every byte value.
const os::ReadableFile& elements() {
  static const os::ReadableFile file = [] {
    std::string path = "/tmp/muster-test-XXXXXX";
    const os::Fd fd(::mkstemp(path.data()));
    std::vector<unsigned char> bytes(file_bytes);
    for (std::size_t i = file_bytes / 2; i < file_bytes; ++i) bytes[i] = static_cast<unsigned char>(i);
    if (::write(fd.get(), bytes.data(), bytes.size()) != static_cast<ssize_t>(file_bytes)) ::abort();
    os::ReadableFile opened = os::ReadableFile::open(path);
    ::unlink(path.c_str());
    return opened;
  }();
  return file;
}

void read_some(const ForeignTensor& tensor, std::size_t number, ChunkCache& cache) {
  const std::uint64_t wanted = std::min(most_read, tensor.bytes) / tensor.item_bytes * tensor.item_bytes;
  if (tensor.layout == hdf5::StorageLayout::compact) {
    if (tensor.compact.size() != tensor.bytes) ::abort();
    return;
  }
  if (tensor.layout == hdf5::StorageLayout::contiguous) {
    if (tensor.offset != 0 && (tensor.offset > file_bytes || tensor.bytes > file_bytes - tensor.offset)) ::abort();
    return;
  }
  // Chunks of one element make a call for each.
  if (tensor.chunk_bytes > (1 << 20)) return;
  std::vector<std::byte> target(wanted);
  for (const std::uint64_t from : {std::uint64_t{0}, (tensor.bytes - wanted) / tensor.item_bytes}) {
    try {
      read_chunked(elements(), tensor, number, from, target, cache);
    } catch (const Error&) {
      // Refused.
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // The magic is not what is looked for.
  std::string bytes(hdf5::foreign_report_magic);
  bytes.append(reinterpret_cast<const char*>(data), size);
  try {
    const ForeignReport report = parse_foreign_report(std::as_bytes(std::span(bytes)), {file_bytes, 1024});
    ChunkCache cache(1 << 16);
    for (std::size_t i = 0; i < report.tensors.size() && i < 8; ++i) {
      const ForeignTensor& tensor = report.tensors[i];
      if (byte_size(tensor.dtype, tensor.shape) != tensor.bytes) ::abort();
      read_some(tensor, i, cache);
    }
  } catch (const Error&) {
    // Refused.
  }
  return 0;
}
