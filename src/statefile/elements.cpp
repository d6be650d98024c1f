// SPDX-License-Identifier: Apache-2.0
// Elements from the file to memory, compressed or not.

#include <fmt/core.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "muster/error.hpp"
#include "src/core/checksum.hpp"
#include "src/core/parallel.hpp"
#include "src/core/quoted.hpp"
#include "src/statefile/chunk_codec.hpp"
#include "src/statefile/contents.hpp"

namespace muster::statefile {
namespace {

constexpr std::uint64_t piece_bytes = std::uint64_t{8} << 20;

/// One thread's memory from chunk to chunk.
struct Worker {
  ChunkDecoder decoder;
  std::vector<std::byte> stored;
  std::vector<std::byte> elements;
};

class ChunkedReading {
 public:
  ChunkedReading(const os::ReadableFile& file, const Catalogue& catalogue, std::size_t index)
      : file_(file),
        catalogue_(catalogue),
        tensor_(catalogue.tensors[index]),
        chunking_(catalogue.chunking[index]),
        // The catalogue was checked when it was decoded.
        grid_(ChunkGrid::of(tensor_.dtype, tensor_.shape, chunking_.dim, chunking_.rows).value()) {}

  void read(std::uint64_t offset, std::span<std::byte> target, std::size_t workers) {
    const std::uint64_t first = grid_.chunk_at(offset);
    const std::uint64_t last = grid_.chunk_at(offset + target.size() - 1);
    std::vector<std::optional<Worker>> memory(workers);
    parallel_for(last - first + 1, workers, [&](std::size_t i, std::size_t worker) {
      if (!memory[worker]) memory[worker].emplace();
      read_chunk(first + i, offset, target, *memory[worker]);
    });
  }

 private:
  void read_chunk(std::uint64_t chunk, std::uint64_t offset, std::span<std::byte> target, Worker& worker) {
    const std::uint64_t begin = grid_.begin(chunk);
    const std::uint64_t end = std::min(begin + grid_.bytes(chunk), offset + target.size());
    if (begin >= offset) {
      decode(chunk, target.subspan(begin - offset, end - begin), worker);
      return;
    }
    // The range begins inside of it.
    worker.elements.resize(end - begin);
    decode(chunk, worker.elements, worker);
    std::ranges::copy(std::span(worker.elements).subspan(offset - begin), target.begin());
  }

  void decode(std::uint64_t number, std::span<std::byte> target, Worker& worker) {
    const StoredChunk& chunk = catalogue_.chunks[chunking_.first_chunk + number];
    worker.stored.resize(chunk.bytes);
    file_.read_at(chunk.offset, worker.stored);
    if (tensor_checksum(worker.stored) != chunk.checksum) refuse(number, "its bytes are not those that were written");
    if (!worker.decoder.decode(worker.stored, chunk.filter_mask != 0, grid_.chunk_bytes(), itemsize(tensor_.dtype),
                               target))
      refuse(number, "it does not decompress to its length");
  }

  [[noreturn]] void refuse(std::uint64_t number, const char* words) const {
    throw Error(ErrorKind::corrupt,
                fmt::format("reading {}: tensor {}, chunk {}: {}", in_quotes(file_.path()), in_quotes(tensor_.name),
                            number, words),
                {.path = file_.path()});
  }

  const os::ReadableFile& file_;
  const Catalogue& catalogue_;
  const StateTensor& tensor_;
  const Chunking& chunking_;
  ChunkGrid grid_;
};

}  // namespace

void read_elements(const os::ReadableFile& file, const Catalogue& catalogue, std::size_t index, std::uint64_t offset,
                   std::span<std::byte> target, std::size_t workers) {
  if (target.empty()) return;
  const StateTensor& tensor = catalogue.tensors[index];
  if (tensor.compressed) return ChunkedReading(file, catalogue, index).read(offset, target, workers);
  const std::size_t pieces = (target.size() - 1) / piece_bytes + 1;
  parallel_for(pieces, workers, [&](std::size_t piece, std::size_t) {
    const std::uint64_t begin = piece * piece_bytes;
    file.read_at(tensor.offset + offset + begin,
                 target.subspan(begin, std::min<std::uint64_t>(piece_bytes, target.size() - begin)));
  });
}

}  // namespace muster::statefile
