// SPDX-License-Identifier: Apache-2.0
// Listings of muster-hdf5-reader, as an attacker who controls the reader could write them. A listing is read or
// refused. Elements with an offset must be inside the file of 4096 bytes.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "muster/error.hpp"
#include "src/checkpoint/thirdparty/hdf5/file.hpp"
#include "tests/fuzz/target.hpp"

using namespace muster;
using muster::test::require;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  constexpr std::uint64_t file_bytes = 4096;
  // The magic is added, because the target does not test it.
  std::string bytes(hdf5::foreign_report_magic);
  bytes.append(reinterpret_cast<const char*>(data), size);
  try {
    const ForeignReport report = parse_foreign_report(std::as_bytes(std::span(bytes)), file_bytes);
    require(std::is_sorted(report.tensors.begin(), report.tensors.end(),
                           [](const ForeignTensor& a, const ForeignTensor& b) { return a.name < b.name; }));
    for (const ForeignTensor& tensor : report.tensors) {
      require(byte_size(tensor.dtype, tensor.shape) == tensor.bytes && tensor.item_bytes != 0);
      require(tensor.offset == 0 || (tensor.offset <= file_bytes && tensor.bytes <= file_bytes - tensor.offset));
    }
    for (const Omission& omission : report.omissions)
      require(std::ranges::all_of(omission.reason, [](char c) { return static_cast<unsigned char>(c) >= 0x20; }));
  } catch (const Error&) {
    // The listing is refused.
  }
  return 0;
}
