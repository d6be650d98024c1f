// SPDX-License-Identifier: Apache-2.0
// Any bytes as the catalogue of a state file of 1 MiB. They are refused with Error(corrupt), or yield tensors and
// chunks that are inside the file, do not overlap, and are written again as the same bytes.
//
// The catalogue follows the first byte. If that byte is odd, the length of the names is corrected.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "src/statefile/format.hpp"
#include "tests/fuzz/target.hpp"

namespace {

using namespace muster;
using namespace muster::statefile;
using muster::test::may_fail;
using muster::test::require;

constexpr std::uint64_t file_bytes = 1 << 20;

void check_tensor(const Catalogue& catalogue, std::size_t i) {
  const StateTensor& tensor = catalogue.tensors[i];
  const Chunking& chunking = catalogue.chunking[i];
  require(tensor.bytes == byte_size(tensor.dtype, tensor.shape) && tensor.compressed == (chunking.rows != 0));
  if (!tensor.compressed) return require(tensor.stored_bytes == tensor.bytes);
  const std::optional<ChunkGrid> grid = ChunkGrid::of(tensor.dtype, tensor.shape, chunking.dim, chunking.rows);
  require(grid.has_value() && grid->chunk_bytes() <= largest_chunk);
  require(chunking.first_chunk + grid->count() <= catalogue.chunks.size());
  const std::uint64_t last = grid->count() - 1;
  require(grid->begin(last) + grid->bytes(last) == tensor.bytes && grid->chunk_at(tensor.bytes - 1) == last);
}

void check(const Catalogue& catalogue) {
  for (std::size_t i = 0; i < catalogue.tensors.size(); ++i) check_tensor(catalogue, i);
  std::uint64_t end = head_bytes;
  for (const Extent& extent : stored_extents(catalogue)) {
    require(extent.offset >= end && extent.bytes <= file_bytes && extent.end() <= file_bytes);
    end = extent.end();
  }
  NameIndex index;
  if (index.build(catalogue.tensors)) return;
  for (std::size_t i = 0; i < catalogue.tensors.size(); ++i)
    require(index.find(catalogue.tensors, catalogue.tensors[i].name) == i);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::string name = "fuzz";
  if (size == 0) return 0;
  const std::span<const std::byte> input = std::as_bytes(std::span(data, size)).subspan(1);
  std::vector<std::byte> bytes(input.begin(), input.end());
  UserBlock block;
  block.file_bytes = file_bytes;
  block.catalogue = {file_bytes / 2, bytes.size()};
  block.config = {file_bytes / 4, 100};
  if (bytes.size() >= 64) {
    std::uint64_t counts[4];
    std::memcpy(counts, bytes.data() + 8, sizeof counts);
    block.tensors = counts[0];
    const std::uint64_t before = 64 + 64 * counts[0] + 8 * counts[1] + 24 * counts[2];
    counts[3] = bytes.size() - before;
    if (data[0] % 2 == 1) std::memcpy(bytes.data() + 32, &counts[3], 8);
  }
  may_fail({ErrorKind::corrupt}, [&] {
    const Catalogue catalogue = decode_catalogue(bytes, block, name);
    check(catalogue);
    require(encode_catalogue(catalogue) == bytes);
  });
  return 0;
}
