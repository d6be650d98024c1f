// SPDX-License-Identifier: Apache-2.0
#include "muster/state_file.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <numeric>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/core/checksum.hpp"
#include "src/core/thread_pool.hpp"
#include "src/os/file.hpp"
#include "src/os/process.hpp"
#include "src/statefile/chunk_codec.hpp"
#include "src/statefile/format.hpp"
#include "src/trace/span.hpp"

namespace muster {

struct StateFile::Contents {
  os::ReadableFile file;
  statefile::UserBlock block;
  statefile::Catalogue catalogue;
  statefile::NameIndex index;
  std::shared_ptr<const os::MappedFile> mapping;  ///< null if the file is read instead of mapped
};

namespace statefile {
namespace {

[[noreturn]] void fail_reading(ErrorKind kind, const std::string& path, const std::string& words) {
  throw file_error(kind, "reading", path, words);
}

constexpr std::uint64_t read_piece = std::uint64_t{8} << 20;

/// Buffers of one thread, reused for each chunk.
struct ChunkWorker {
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
    std::vector<std::optional<ChunkWorker>> memory(workers);
    parallel_for(last - first + 1, workers, [&](std::size_t i, std::size_t worker) {
      if (!memory[worker]) memory[worker].emplace();
      read_chunk(first + i, offset, target, *memory[worker]);
    });
  }

 private:
  void read_chunk(std::uint64_t chunk, std::uint64_t offset, std::span<std::byte> target, ChunkWorker& worker) {
    const std::uint64_t begin = grid_.begin(chunk);
    const std::uint64_t end = std::min(begin + grid_.bytes(chunk), offset + target.size());
    if (begin >= offset) {
      decode(chunk, target.subspan(begin - offset, end - begin), worker);
      return;
    }
    // The requested range starts inside the chunk.
    worker.elements.resize(end - begin);
    decode(chunk, worker.elements, worker);
    std::ranges::copy(std::span(worker.elements).subspan(offset - begin), target.begin());
  }

  void decode(std::uint64_t number, std::span<std::byte> target, ChunkWorker& worker) {
    const StoredChunk& chunk = catalogue_.chunks[chunking_.first_chunk + number];
    worker.stored.resize(chunk.bytes);
    file_.read_at(chunk.offset, worker.stored);
    if (tensor_checksum(worker.stored) != chunk.checksum) refuse(number, "checksum mismatch: data is corrupted");
    if (!worker.decoder.decode(worker.stored, chunk.filter_mask != 0, grid_.chunk_bytes(), itemsize(tensor_.dtype),
                               target))
      refuse(number, "its decompressed length is not the expected one");
  }

  [[noreturn]] void refuse(std::uint64_t number, const char* words) const {
    fail_reading(ErrorKind::corrupt, file_.path(),
                 fmt::format("tensor {}, chunk {}: {}", in_quotes(tensor_.name), number, words));
  }

  const os::ReadableFile& file_;
  const Catalogue& catalogue_;
  const StateTensor& tensor_;
  const Chunking& chunking_;
  ChunkGrid grid_;
};

UserBlock read_user_block(const os::ReadableFile& file) {
  std::array<std::byte, head_bytes> head{};
  const std::span<std::byte> there = std::span(head).first(std::min<std::uint64_t>(head_bytes, file.bytes()));
  file.read_at(0, there);
  return decode_user_block(there, file.bytes(), file.path());
}

Catalogue read_catalogue(const os::ReadableFile& file, const UserBlock& block) {
  // The memory is not zeroed first, because it may be megabytes.
  const auto memory = std::make_unique_for_overwrite<std::byte[]>(block.catalogue.bytes);
  const std::span<std::byte> bytes(memory.get(), block.catalogue.bytes);
  file.read_at(block.catalogue.offset, bytes);
  if (tensor_checksum(bytes) != block.catalogue_checksum)
    throw file_error(ErrorKind::corrupt, "opening the state file", file.path(),
                     "catalogue: checksum mismatch: data is corrupted");
  return decode_catalogue(bytes, block, file.path());
}

}  // namespace

void read_elements(const os::ReadableFile& file, const Catalogue& catalogue, std::size_t index, std::uint64_t offset,
                   std::span<std::byte> target, std::size_t workers) {
  if (target.empty()) return;
  const StateTensor& tensor = catalogue.tensors[index];
  if (tensor.compressed) return ChunkedReading(file, catalogue, index).read(offset, target, workers);
  const std::size_t pieces = (target.size() - 1) / read_piece + 1;
  parallel_for(pieces, workers, [&](std::size_t piece, std::size_t) {
    const std::uint64_t begin = piece * read_piece;
    file.read_at(tensor.offset + offset + begin,
                 target.subspan(begin, std::min<std::uint64_t>(read_piece, target.size() - begin)));
  });
}

}  // namespace statefile

namespace {

// Verifies a state file byte for byte against its own checksums.
//
// 1. The commit mark and the catalogue are read again, so that changes since open() are detected.
// 2. One checksum covers everything that does not belong to a tensor: superblock, gaps, config, catalogue, HDF5's
//    structures.
// 3. Each stored chunk has a checksum, and each tensor has one of its elements.

using statefile::Extent;

constexpr std::uint64_t checked_piece = std::uint64_t{4} << 20;
constexpr std::uint64_t chunks_bytes = std::uint64_t{16} << 20;  // bytes of a compressed tensor that are read at once

class StateFileCheck {
 public:
  StateFileCheck(const os::ReadableFile& file, const statefile::UserBlock& block, const statefile::Catalogue& catalogue,
                 std::shared_ptr<const os::MappedFile> mapping, const ProgressCallback& progress,
                 std::vector<std::size_t> tensors)
      : file_(file),
        block_(block),
        catalogue_(catalogue),
        mapping_(std::move(mapping)),
        tensors_(std::move(tensors)),
        progress_(progress,
                  std::accumulate(tensors_.begin(), tensors_.end(), std::uint64_t{0},
                                  [&](std::uint64_t sum, std::size_t i) { return sum + catalogue.tensors[i].bytes; })) {
  }

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

  // A part that cannot be read is a problem of the file, and the other parts are still checked.
  template <class Work>
  void guarded(const std::string& tensor, Work&& work) {
    try {
      work();
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::out_of_space) throw;
      add(tensor, error.what());
    }
  }

  void check_mark() {
    const statefile::UserBlock block = statefile::read_user_block(file_);
    if (statefile::encode_user_block(block) != statefile::encode_user_block(block_))
      add("", "another state has replaced the one that was opened");
    statefile::read_catalogue(file_, block_);
  }

  void check_metadata() {
    TensorChecksum sum;
    std::vector<std::byte> buffer;
    const auto take = [&](std::uint64_t begin, std::uint64_t end, TensorChecksum& into) {
      for (; begin < end; begin += buffer.size()) {
        buffer.resize(std::min(checked_piece, end - begin));
        file_.read_at(begin, buffer);
        into.add(buffer);
      }
    };
    std::uint64_t end = statefile::user_block_bytes;
    for (const Extent& stored : statefile::stored_extents(catalogue_)) {
      take(end, stored.offset, sum);
      end = stored.end();
    }
    take(end, block_.file_bytes, sum);
    if (sum.value() == block_.metadata_checksum) return;
    TensorChecksum config;
    take(block_.config.offset, block_.config.end(), config);
    add("", config.value() == block_.config_checksum
                ? "HDF5 structures or gaps between tensors: checksum mismatch: data is corrupted"
                : "config: checksum mismatch: data is corrupted");
  }

  void check_tensors() {
    // The largest tensors come first, so that the last thread to finish has a small one.
    std::ranges::stable_sort(tensors_, std::greater(), [&](std::size_t i) { return catalogue_.tensors[i].bytes; });
    parallel_for(tensors_.size(), static_cast<std::size_t>(os::usable_cores()), [&](std::size_t place, std::size_t) {
      const std::size_t i = tensors_[place];
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
    if (sum != tensor.checksum) add(tensor.name, "checksum mismatch: data is corrupted");
  }

  // Reading compares each stored chunk with its checksum.
  std::uint64_t read_checksum(std::size_t index) {
    const StateTensor& tensor = catalogue_.tensors[index];
    // If there are few tensors, each may be large: several threads then decompress one.
    const auto cores = static_cast<std::size_t>(os::usable_cores());
    const std::size_t workers = tensor.compressed && tensors_.size() < cores ? cores : 1;
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
  std::vector<std::size_t> tensors_;  // those that are checked
  ProgressCounter progress_;
  ForkMutex mutex_;
  std::vector<StateProblem> problems_;
};

}  // namespace

StateFile::StateFile(std::shared_ptr<const Contents> contents) noexcept : contents_(std::move(contents)) {}

StateFile StateFile::open(const std::string& path, FileAccess access) {
  os::ReadableFile file = os::ReadableFile::open(path);
  const statefile::UserBlock block = statefile::read_user_block(file);
  statefile::Catalogue catalogue = statefile::read_catalogue(file, block);
  statefile::NameIndex index;
  if (const std::optional<std::size_t> twice = index.build(catalogue.tensors))
    throw file_error(ErrorKind::corrupt, "opening the state file", path,
                     fmt::format("tensor {}: the name is duplicated", in_quotes(catalogue.tensors[*twice].name)));
  std::shared_ptr<const os::MappedFile> mapping;
  if (access == FileAccess::map || (access == FileAccess::automatic && !file.is_remote())) mapping = file.map();
  return StateFile(std::make_shared<const Contents>(
      Contents{std::move(file), block, std::move(catalogue), std::move(index), std::move(mapping)}));
}

bool StateFile::is_state_file(const std::string& path) {
  const os::ReadableFile file = os::ReadableFile::open(path);
  std::array<std::byte, 8> head{};
  if (file.bytes() < head.size()) return false;
  file.read_at(0, head);
  return statefile::has_magic(head);
}

const std::string& StateFile::path() const noexcept {
  return contents_->file.path();
}

const StateFileInfo& StateFile::info() const noexcept {
  return contents_->block.info;
}

std::uint64_t StateFile::file_bytes() const noexcept {
  return contents_->block.file_bytes;
}

std::uint32_t StateFile::format_version() const noexcept {
  return contents_->block.version;
}

const std::vector<StateTensor>& StateFile::tensors() const noexcept {
  return contents_->catalogue.tensors;
}

std::optional<std::size_t> StateFile::find(std::string_view name) const noexcept {
  return contents_->index.find(tensors(), name);
}

std::string StateFile::config_text() const {
  const statefile::UserBlock& block = contents_->block;
  std::string text(block.config.bytes, '\0');
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(text));
  contents_->file.read_at(block.config.offset, bytes);
  if (tensor_checksum(bytes) != block.config_checksum)
    statefile::fail_reading(ErrorKind::corrupt, path(), "config: checksum mismatch: data is corrupted");
  return text;
}

Config StateFile::config() const {
  return with_file("reading the config", path(), [&] { return parse_json(config_text()); });
}

Tensor StateFile::tensor(std::size_t index) const {
  if (index >= tensors().size())
    statefile::fail_reading(ErrorKind::not_found, path(),
                            fmt::format("tensor index {1} is out of range for {0} tensors", tensors().size(), index));
  const StateTensor& entry = tensors()[index];
  if (contents_->mapping != nullptr && !entry.compressed) {
    const std::byte* data = contents_->mapping->bytes().data() + entry.offset;
    return {TensorView(entry.dtype, entry.shape, entry.bytes == 0 ? nullptr : data), contents_->mapping};
  }
  Tensor tensor = Tensor::allocate(entry.dtype, entry.shape);
  // Decompression uses all cores; plain reads use as many threads as a copy.
  const std::size_t workers = entry.compressed ? static_cast<std::size_t>(os::usable_cores()) : copy_workers();
  statefile::read_elements(contents_->file, contents_->catalogue, index, 0, {tensor.mutable_data(), tensor.nbytes()},
                           workers);
  return tensor;
}

Tensor StateFile::tensor(std::string_view name) const {
  const std::optional<std::size_t> index = find(name);
  if (!index)
    statefile::fail_reading(ErrorKind::not_found, path(), fmt::format("tensor {} does not exist", in_quotes(name)));
  return tensor(*index);
}

void StateFile::read(std::size_t index, std::uint64_t offset, std::span<std::byte> target) const {
  if (index >= tensors().size() || offset > tensors()[index].bytes || target.size() > tensors()[index].bytes - offset)
    statefile::fail_reading(
        ErrorKind::invalid_argument, path(),
        fmt::format("{} bytes at offset {} of tensor index {} are out of range", target.size(), offset, index));
  statefile::read_elements(contents_->file, contents_->catalogue, index, offset, target, 1);
}

State StateFile::load() const {
  trace::Span span(trace::SpanKind::file, "load state file");
  State state{config(), {}};
  state.weights.reserve(tensors().size());
  for (std::size_t i = 0; i < tensors().size(); ++i) {
    state.weights.emplace_back(tensors()[i].name, tensor(i));
    span.add_bytes(tensors()[i].bytes);
  }
  return state;
}

std::vector<StateProblem> StateFile::check(const ProgressCallback& progress,
                                           const std::function<bool(std::string_view)>& selects) const {
  std::vector<std::size_t> selected;
  for (std::size_t i = 0; i < tensors().size(); ++i)
    if (!selects || selects(tensors()[i].name)) selected.push_back(i);
  return StateFileCheck(contents_->file, contents_->block, contents_->catalogue, contents_->mapping, progress,
                        std::move(selected))
      .check();
}

}  // namespace muster
