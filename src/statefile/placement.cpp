// SPDX-License-Identifier: Apache-2.0
#include "src/statefile/placement.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <optional>

#include "muster/error.hpp"
#include "src/core/quoted.hpp"
#include "src/core/utf8.hpp"
#include "src/statefile/chunk_codec.hpp"
#include "src/statefile/name_index.hpp"

namespace muster::statefile {
namespace {

// Below this a chunk's entries in the file are more than compression saves.
constexpr std::uint64_t least_compressed = 1024;
constexpr std::uint64_t least_chunk = 64;
// Far from where sums of offsets would overflow.
constexpr std::uint64_t largest_file = std::uint64_t{1} << 61;
constexpr std::uint64_t most_chunks = std::uint64_t{1} << 32;

class Placing {
 public:
  Placing(const StateFileOptions& options, const std::string& path) : options_(options), path_(path) {}

  Placement place(std::vector<StateFileWriter::Entry> entries) {
    check_options();
    for (StateFileWriter::Entry& entry : entries) add(std::move(entry));
    NameIndex names;
    if (const std::optional<std::size_t> twice = names.build(result_.catalogue.tensors))
      refuse(fmt::format("two tensors are called {}", in_quotes(result_.catalogue.tensors[*twice].name)));
    if (chunks_ > most_chunks) refuse(fmt::format("it would have {} chunks; take larger ones", chunks_));
    result_.catalogue.chunks.resize(chunks_);
    result_.data_end = end_;
    return std::move(result_);
  }

 private:
  [[noreturn]] void refuse(const std::string& words) const {
    throw Error(ErrorKind::argument, fmt::format("writing the state file {}: {}", in_quotes(path_), words),
                {.path = path_});
  }

  void check_options() const {
    if (options_.info.world_size < 1 || options_.info.rank < 0 || options_.info.rank >= options_.info.world_size)
      refuse(fmt::format("there is no rank {} of {}", options_.info.rank, options_.info.world_size));
    if (options_.zstd_level && !is_zstd_level(*options_.zstd_level))
      refuse(fmt::format("zstd has no level {} (1 to 22)", *options_.zstd_level));
    if (options_.chunk_bytes < least_chunk || options_.chunk_bytes > largest_chunk)
      refuse(fmt::format("chunks have between {} bytes and 64 MiB, not {}", least_chunk, options_.chunk_bytes));
  }

  void add(StateFileWriter::Entry entry) {
    if (entry.name.empty() || entry.name.find('\0') != std::string::npos || !core::is_utf8(entry.name))
      refuse(fmt::format("{} is no name: empty, not UTF-8, or with a NUL", in_quotes(entry.name)));
    if (entry.name.size() > longest_name)
      refuse(fmt::format("the name {} is longer than {} bytes", in_quotes(entry.name), longest_name));
    if (entry.shape.size() > largest_rank)
      refuse(fmt::format("tensor {} has {} dimensions; {} are possible", in_quotes(entry.name), entry.shape.size(),
                         largest_rank));
    StateTensor tensor{.name = std::move(entry.name), .dtype = entry.dtype, .shape = std::move(entry.shape)};
    tensor.bytes = bytes_of(tensor);
    Chunking chunking;
    if (options_.zstd_level && tensor.bytes >= least_compressed) {
      const ChunkGrid grid = ChunkGrid::make(tensor.dtype, tensor.shape, options_.chunk_bytes);
      tensor.compressed = true;
      chunking = {grid.rows(), chunks_, static_cast<std::uint8_t>(grid.dim())};
      chunks_ += grid.count();
    } else {
      tensor.stored_bytes = tensor.bytes;
      if (tensor.bytes != 0) tensor.offset = take(tensor);
    }
    result_.catalogue.tensors.push_back(std::move(tensor));
    result_.catalogue.chunking.push_back(chunking);
  }

  std::uint64_t bytes_of(const StateTensor& tensor) const {
    try {
      return byte_size(tensor.dtype, tensor.shape);
    } catch (const Error& error) {
      refuse(fmt::format("tensor {}: {}", in_quotes(tensor.name), error.what()));
    }
  }

  std::uint64_t take(const StateTensor& tensor) {
    const std::uint64_t alignment = tensor.bytes >= least_page_aligned ? page_alignment : element_alignment;
    const std::uint64_t begin = (end_ + alignment - 1) / alignment * alignment;
    if (tensor.bytes > largest_file - begin)
      refuse(fmt::format("with the {} bytes of tensor {} it is larger than a file can be", tensor.bytes,
                         in_quotes(tensor.name)));
    end_ = begin + tensor.bytes;
    return begin;
  }

  const StateFileOptions& options_;
  const std::string& path_;
  Placement result_;
  std::uint64_t end_ = head_bytes;
  std::uint64_t chunks_ = 0;
};

}  // namespace

Placement place_tensors(std::vector<StateFileWriter::Entry> entries, const StateFileOptions& options,
                        const std::string& path) {
  return Placing(options, path).place(std::move(entries));
}

}  // namespace muster::statefile
