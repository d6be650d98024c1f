// SPDX-License-Identifier: Apache-2.0
// A state file held against its own checksums, byte for byte.
//
// 1. Commit mark and catalogue are read again, so that what happened since open() is seen.
// 2. Everything that belongs to no tensor is one checksum: superblock, gaps, config, catalogue, HDF5's structures.
// 3. Each stored chunk has a checksum, and each tensor one of its elements.

#include <fmt/core.h>

#include <algorithm>
#include <mutex>
#include <numeric>

#include "muster/error.hpp"
#include "src/core/checksum.hpp"
#include "src/core/parallel.hpp"
#include "src/core/progress_counter.hpp"
#include "src/os/process.hpp"
#include "src/statefile/contents.hpp"

namespace muster {
namespace {

using statefile::Extent;

constexpr std::uint64_t checked_piece = std::uint64_t{4} << 20;
constexpr std::uint64_t chunks_bytes = std::uint64_t{16} << 20;  // of a compressed tensor at once

class Checking {
 public:
  Checking(const os::ReadableFile& file, const statefile::UserBlock& block, const statefile::Catalogue& catalogue,
           std::shared_ptr<const os::MappedFile> mapping, const ProgressCallback& progress)
      : file_(file),
        block_(block),
        catalogue_(catalogue),
        mapping_(std::move(mapping)),
        progress_(progress, std::accumulate(catalogue.tensors.begin(), catalogue.tensors.end(), std::uint64_t{0},
                                            [](std::uint64_t sum, const StateTensor& t) { return sum + t.bytes; })) {}

  std::vector<StateProblem> check() {
    guarded("", [&] { check_mark(); });
    guarded("", [&] { check_metadata(); });
    check_tensors();
    std::ranges::stable_sort(problems_, {}, &StateProblem::tensor);
    return std::move(problems_);
  }

 private:
  void add(const std::string& tensor, const std::string& words) {
    const std::lock_guard lock(mutex_);
    problems_.push_back({tensor, words});
  }

  // What cannot be read is a problem of the file, and the rest is still looked at.
  template <class Work>
  void guarded(const std::string& tensor, Work&& work) {
    try {
      work();
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::no_space) throw;
      add(tensor, error.what());
    }
  }

  void check_mark() {
    const statefile::UserBlock block = statefile::read_user_block(file_);
    if (statefile::encode_user_block(block) != statefile::encode_user_block(block_))
      add("", "it is another state than the one that was opened");
    statefile::read_catalogue(file_, block_);
  }

  void check_metadata() {
    TensorChecksum sum;
    std::vector<std::byte> buffer;
    const auto take = [&](std::uint64_t begin, std::uint64_t end) {
      for (; begin < end; begin += buffer.size()) {
        buffer.resize(std::min(checked_piece, end - begin));
        file_.read_at(begin, buffer);
        sum.add(buffer);
      }
    };
    std::uint64_t end = statefile::user_block_bytes;
    for (const Extent& stored : statefile::stored_extents(catalogue_)) {
      take(end, stored.offset);
      end = stored.end();
    }
    take(end, block_.file_bytes);
    if (sum.value() == block_.metadata_checksum) return;
    TensorChecksum config;
    for (std::uint64_t at = 0; at < block_.config.bytes; at += buffer.size()) {
      buffer.resize(std::min(checked_piece, block_.config.bytes - at));
      file_.read_at(block_.config.offset + at, buffer);
      config.add(buffer);
    }
    add("", config.value() == block_.config_checksum
                ? "HDF5's structures, or gaps between tensors, are not what was written (checksum)"
                : "the config is not what was written (checksum)");
  }

  void check_tensors() {
    // The largest first: the last thread to finish has a small one.
    std::vector<std::size_t> order(catalogue_.tensors.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, std::greater(), [&](std::size_t i) { return catalogue_.tensors[i].bytes; });
    parallel_for(order.size(), static_cast<std::size_t>(os::usable_cores()), [&](std::size_t place, std::size_t) {
      const std::size_t i = order[place];
      guarded(catalogue_.tensors[i].name, [&] { check_tensor(i); });
    });
  }

  void check_tensor(std::size_t index) {
    const StateTensor& tensor = catalogue_.tensors[index];
    std::uint64_t sum = 0;
    if (mapping_ != nullptr && !tensor.compressed) {
      const auto bytes = mapping_->bytes().subspan(tensor.offset, tensor.bytes);
      sum = mapped_checksum(bytes, file_.path(), [&](std::uint64_t count) { progress_.add(count); });
    } else {
      sum = read_checksum(index);
    }
    if (sum != tensor.checksum) add(tensor.name, "its elements are not those that were written (checksum)");
  }

  // Reading compares each stored chunk with its checksum.
  std::uint64_t read_checksum(std::size_t index) {
    const StateTensor& tensor = catalogue_.tensors[index];
    // Of few tensors each may be large: then several threads decompress one.
    const auto cores = static_cast<std::size_t>(os::usable_cores());
    const std::size_t workers = tensor.compressed && catalogue_.tensors.size() < cores ? cores : 1;
    TensorChecksum sum;
    std::vector<std::byte> buffer;
    for (std::uint64_t at = 0; at < tensor.bytes; at += buffer.size()) {
      buffer.resize(piece_at(index, at));
      statefile::read_elements(file_, catalogue_, index, at, buffer, workers);
      sum.add(buffer);
      progress_.add(buffer.size());
    }
    return sum.value();
  }

  // Whole chunks, so that none is decompressed twice.
  std::uint64_t piece_at(std::size_t index, std::uint64_t at) const {
    const StateTensor& tensor = catalogue_.tensors[index];
    const statefile::Chunking& chunking = catalogue_.chunking[index];
    if (chunking.rows == 0) return std::min(checked_piece, tensor.bytes - at);
    const auto grid = statefile::ChunkGrid::of(tensor.dtype, tensor.shape, chunking.dim, chunking.rows).value();
    const std::uint64_t more = std::max<std::uint64_t>(chunks_bytes / grid.chunk_bytes(), 1) - 1;
    const std::uint64_t last = std::min(grid.chunk_at(at) + more, grid.count() - 1);
    return grid.begin(last) + grid.bytes(last) - at;
  }

  const os::ReadableFile& file_;
  const statefile::UserBlock& block_;
  const statefile::Catalogue& catalogue_;
  std::shared_ptr<const os::MappedFile> mapping_;
  ProgressCounter progress_;
  std::mutex mutex_;
  std::vector<StateProblem> problems_;
};

}  // namespace

std::vector<StateProblem> StateFile::check(const ProgressCallback& progress) const {
  return Checking(contents_->file, contents_->block, contents_->catalogue, contents_->mapping, progress).check();
}

}  // namespace muster
