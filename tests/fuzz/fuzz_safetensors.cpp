// SPDX-License-Identifier: Apache-2.0
// Any bytes as the beginning of a safetensors file. They are refused with Error(corrupt), or yield tensors that are
// contiguous in the file. A header that was read can be written, and is then read with the same contents.
//
// The first byte selects the input. Even: a file. Odd: two bytes with the length of the tensors' data, and the JSON
// header.

#include <cstddef>
#include <cstdint>
#include <string>

#include "muster/error.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/formats/safetensors.hpp"
#include "tests/fuzz/target.hpp"

namespace {

using namespace muster;
using muster::test::require;

SafetensorsHeader parse(const std::string& head, std::uint64_t file_size) {
  return parse_safetensors_header(std::as_bytes(std::span(head)), file_size, "fuzz");
}

void write_again(SafetensorsHeader header) {
  std::vector<TensorEntry> tensors = header.tensors;
  const std::string head = make_safetensors_header(tensors, header.metadata, "fuzz");
  const std::uint64_t end = tensors.empty() ? head.size() : tensors.back().offset + tensors.back().bytes;
  const SafetensorsHeader again = parse(head, end);
  require(again.metadata == header.metadata && again.tensors.size() == tensors.size());
  // Empty tensors have no fixed offset, so only their names determine the order of adjacent ones.
  std::uint64_t at = again.data_begin;
  for (const TensorEntry& entry : again.tensors) {
    require(entry.offset == at);
    at += entry.bytes;
  }
  require(at == end && again.data_begin % 8 == 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 3) return 0;
  std::string head(reinterpret_cast<const char*>(data) + 1, size - 1);
  std::uint64_t file_size = head.size();
  if (data[0] % 2 == 1) {
    const std::uint64_t data_bytes = data[1] + 256U * data[2];
    std::string length;
    for (int i = 0; i < 8; ++i) length.push_back(static_cast<char>((size - 3) >> (8 * i)));
    head = length + head.substr(2);
    file_size = head.size() + data_bytes;
  }
  SafetensorsHeader header;
  try {
    header = parse(head, file_size);
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::corrupt);
    return 0;
  }
  std::uint64_t at = header.data_begin;
  for (const TensorEntry& entry : header.tensors) {
    require(entry.offset == at && entry.bytes == byte_size(entry.dtype, entry.shape));
    at += entry.bytes;
  }
  require(at == file_size);
  write_again(std::move(header));
  return 0;
}
