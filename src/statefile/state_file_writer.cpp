// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <vector>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/core/tensor.hpp"
#include "src/core/thread_pool.hpp"
#include "src/os/process.hpp"
#include "src/statefile/writer_state.hpp"
#include "src/trace/span.hpp"

namespace muster {
namespace statefile {
namespace {

// The bytes of a strided tensor that are assembled in memory at once.
constexpr std::uint64_t gathered_bytes = write_block;

// HDF5 has 32 bits for the length of a string.
constexpr std::size_t largest_config = std::size_t{1} << 31;

// For smaller tensors, a chunk's entries in the file take more space than compression saves.
constexpr std::uint64_t least_compressed = 1024;
constexpr std::uint64_t least_chunk = 64;
// Far below values at which sums of offsets would overflow.
constexpr std::uint64_t largest_file = std::uint64_t{1} << 61;
constexpr std::uint64_t most_chunks = std::uint64_t{1} << 32;

[[noreturn]] void refuse_writing(const std::string& path, const std::string& words) {
  throw file_error(ErrorKind::invalid_argument, "writing the state file", path, words);
}

/// Checks the contents of a new state file, and assigns an offset to each uncompressed tensor.
class Placing {
 public:
  /// Fills `catalogue`. Checksums, and for compressed tensors all fields except the number of chunks, are set later.
  Placing(const StateFileOptions& options, const std::string& path, Catalogue& catalogue)
      : options_(options), path_(path), catalogue_(catalogue) {}

  /// Returns the end of the data. Compressed chunks and then everything else are written from there on.
  std::uint64_t place(std::vector<StateFileWriter::Entry> entries) {
    check_options();
    for (StateFileWriter::Entry& entry : entries) add(std::move(entry));
    NameIndex names;
    if (const std::optional<std::size_t> twice = names.build(catalogue_.tensors))
      refuse(fmt::format("tensor {}: the name is duplicated", in_quotes(catalogue_.tensors[*twice].name)));
    if (chunks_ > most_chunks) refuse(fmt::format("the file would have {} chunks. Use larger chunks", chunks_));
    catalogue_.chunks.resize(chunks_);
    return end_;
  }

 private:
  [[noreturn]] void refuse(const std::string& words) const { refuse_writing(path_, words); }

  void check_options() const {
    if (options_.info.world_size < 1 || options_.info.rank < 0 || options_.info.rank >= options_.info.world_size)
      refuse(fmt::format("rank {} is out of range for size {}", options_.info.rank, options_.info.world_size));
    if (options_.zstd_level && !is_zstd_level(*options_.zstd_level))
      refuse(fmt::format("zstd level {} is out of range (valid: 1 to 22)", *options_.zstd_level));
    if (options_.chunk_bytes < least_chunk || options_.chunk_bytes > largest_chunk)
      refuse(fmt::format("chunk size {1} bytes is out of range (valid: {0} bytes to 64 MiB)", least_chunk,
                         options_.chunk_bytes));
  }

  void add(StateFileWriter::Entry entry) {
    if (entry.name.empty() || entry.name.find('\0') != std::string::npos || !is_utf8(entry.name))
      refuse(fmt::format("tensor {}: the name is empty, not UTF-8, or has a NUL", in_quotes(entry.name)));
    if (entry.name.size() > longest_name)
      refuse(fmt::format("tensor {}: the name is longer than {} bytes", in_quotes(entry.name), longest_name));
    if (entry.shape.size() > largest_rank)
      refuse(fmt::format("tensor {}: it has {} dimensions, and the limit is {}", in_quotes(entry.name),
                         entry.shape.size(), largest_rank));
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
    catalogue_.tensors.push_back(std::move(tensor));
    catalogue_.chunking.push_back(chunking);
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
      refuse(fmt::format("tensor {1}: with its {0} bytes, the file is larger than a file can be", tensor.bytes,
                         in_quotes(tensor.name)));
    end_ = begin + tensor.bytes;
    return begin;
  }

  const StateFileOptions& options_;
  const std::string& path_;
  Catalogue& catalogue_;
  std::uint64_t end_ = head_bytes;
  std::uint64_t chunks_ = 0;
};

}  // namespace

void TensorTarget::sum(std::span<const std::byte> bytes, std::uint64_t total) {
  if (bytes.size() == total) {
    whole_ = tensor_checksum(bytes);
  } else {
    if (sum_ == nullptr) sum_ = std::make_unique<TensorChecksum>();
    sum_->add(bytes);
  }
}

void TensorTarget::add_to_checksum(std::uint64_t offset, std::span<const std::byte> bytes, std::uint64_t total,
                                   bool stay) {
  std::unique_lock lock(mutex_);
  if (bytes.empty()) return;
  if (!stay) {
    if (offset != summed_) return;
    sum(bytes, total);
    summed_ += bytes.size();
    return;
  }
  later_.emplace(offset, bytes);
  if (std::exchange(is_summing_, true)) return;
  for (auto next = later_.find(summed_); next != later_.end(); next = later_.find(summed_)) {
    const std::span<const std::byte> piece = later_.extract(next).mapped();
    lock.unlock();
    sum(piece, total);
    lock.lock();
    summed_ += piece.size();
  }
  is_summing_ = false;
}

void TensorTarget::set_checksum(std::uint64_t checksum, std::uint64_t total) {
  const std::lock_guard lock(mutex_);
  whole_ = checksum;
  summed_ = total;
}

std::uint64_t TensorTarget::checksum() const {
  if (whole_) return *whole_;
  return sum_ == nullptr ? tensor_checksum({}) : sum_->value();
}

WriterState::WriterState(const std::string& path, const Config& config, std::vector<StateFileWriter::Entry> entries,
                         const StateFileOptions& wanted)
    : options(wanted),
      config_text(to_json(config)),
      file([&] {
        data_end = Placing(options, path, catalogue).place(std::move(entries));
        require_hdf5();
        return os::PublishedFile(path, options.temporary);
      }()),
      temporary(file.temporary()) {
  if (config_text.size() > largest_config)
    refuse_writing(
        path, fmt::format("the config has {} bytes, and the limit of HDF5 is {}", config_text.size(), largest_config));
  targets = std::make_unique<TensorTarget[]>(catalogue.tensors.size());
  // If the disk is too small, this fails before any work is done.
  file.reserve(data_end);
}

void WriterState::refuse(const StateTensor& tensor, const std::string& words) const {
  refuse_writing(file.path(), fmt::format("tensor {}: {}", in_quotes(tensor.name), words));
}

void WriterState::require_writing() const {
  if (is_committed || has_failed)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("{}: writing the state file: {}", in_quotes(file.path()),
                            is_committed ? "the file is already finished"
                                         : "an earlier write failed. Begin again with a new writer"),
                {.path = file.path()});
}

const StateTensor& WriterState::announced(std::size_t index) const {
  require_writing();
  if (index >= catalogue.tensors.size())
    refuse_writing(file.path(), fmt::format("tensor index {1} is out of range for {0} announced tensors",
                                            catalogue.tensors.size(), index));
  return catalogue.tensors[index];
}

void WriterState::check_announced(std::size_t index, const TensorView& tensor) const {
  const StateTensor& entry = announced(index);
  if (tensor.dtype() != entry.dtype || tensor.shape() != entry.shape)
    refuse(entry, fmt::format("expected {} {} as announced, received {} {}", to_string(entry.dtype),
                              to_string(entry.shape), to_string(tensor.dtype()), to_string(tensor.shape())));
}

ChunkGrid WriterState::grid(std::size_t index) const {
  const StateTensor& tensor = catalogue.tensors[index];
  const Chunking& chunking = catalogue.chunking[index];
  return ChunkGrid::of(tensor.dtype, tensor.shape, chunking.dim, chunking.rows).value();
}

void WriterState::put(std::uint64_t offset, std::span<const std::byte> bytes) {
  const std::lock_guard lock(file_mutex);
  file.write_at(offset, bytes);
}

void WriterState::write_plain(std::size_t index, std::uint64_t offset, std::span<const std::byte> bytes) {
  const std::uint64_t at = catalogue.tensors[index].offset + offset;
  put(at, bytes);
  // Starts writeback while other pieces are still copied and summed, so that about half of the data is on the disk when
  // fdatasync is called.
  if (options.durable) file.start_writeback(at, bytes.size());
  targets[index].count(bytes.size());
}

void WriterState::write_piece(std::size_t index, std::uint64_t offset, std::span<const std::byte> bytes) {
  const StateTensor& tensor = announced(index);
  if (offset > tensor.bytes || bytes.size() > tensor.bytes - offset)
    refuse(tensor,
           fmt::format("{} bytes at offset {} are out of range for its {} bytes", bytes.size(), offset, tensor.bytes));
  change([&] { write_bytes(index, offset, bytes, false); });
}

void WriterState::write_bytes(std::size_t index, std::uint64_t offset, std::span<const std::byte> bytes, bool stay) {
  const StateTensor& tensor = catalogue.tensors[index];
  if (tensor.compressed && !bytes.empty()) return write_compressed(index, offset, bytes, stay);
  // Processes block by block, so that each is summed while it is still in the processor's cache.
  while (!bytes.empty()) {
    const std::uint64_t room = write_block - (tensor.offset + offset) % write_block;
    const auto piece = bytes.first(std::min<std::uint64_t>(room, bytes.size()));
    write_plain(index, offset, piece);
    targets[index].add_to_checksum(offset, piece, tensor.bytes, stay);
    offset += piece.size();
    bytes = bytes.subspan(piece.size());
  }
}

void WriterState::write_chunk(std::size_t index, const ChunkGrid& grid, std::uint64_t chunk,
                              std::span<const std::byte> elements, ChunkEncoder& encoder) {
  const StateTensor& tensor = catalogue.tensors[index];
  const ChunkEncoder::Encoded encoded = encoder.encode(elements, grid.chunk_bytes(), itemsize(tensor.dtype));
  const std::uint64_t offset = data_end.fetch_add(encoded.bytes.size());
  put(offset, encoded.bytes);
  if (options.durable) file.start_writeback(offset, encoded.bytes.size());
  catalogue.chunks[catalogue.chunking[index].first_chunk + chunk] = {
      offset, static_cast<std::uint32_t>(encoded.bytes.size()), encoded.is_raw ? raw_filter_mask(tensor.dtype) : 0,
      tensor_checksum(encoded.bytes)};
  targets[index].count(elements.size());
}

void WriterState::write_compressed(std::size_t index, std::uint64_t offset, std::span<const std::byte> bytes,
                                   bool stay) {
  const StateTensor& tensor = catalogue.tensors[index];
  TensorTarget& target = targets[index];
  const ChunkGrid grid = this->grid(index);
  const BorrowedEncoder encoder(*this);
  const auto finish = [&](std::uint64_t chunk, std::span<const std::byte> elements, bool they_stay) {
    write_chunk(index, grid, chunk, elements, *encoder);
    target.add_to_checksum(grid.begin(chunk), elements, tensor.bytes, they_stay);
  };
  while (!bytes.empty()) {
    const std::uint64_t chunk = grid.chunk_at(offset);
    const std::uint64_t into = offset - grid.begin(chunk);
    const auto piece = bytes.first(std::min<std::uint64_t>(grid.bytes(chunk) - into, bytes.size()));
    offset += piece.size();
    bytes = bytes.subspan(piece.size());
    if (piece.size() == grid.bytes(chunk)) {
      finish(chunk, piece, stay);
      continue;
    }
    std::unique_lock lock(target.mutex());
    std::optional<TensorTarget::PartialChunk>& pending = target.pending();
    const bool is_next = into == 0 ? !pending : pending && pending->chunk == chunk && pending->bytes.size() == into;
    if (!is_next)
      refuse(tensor,
             "pieces of a compressed tensor must be written in ascending order, or begin and end at chunk boundaries");
    if (!pending) pending = TensorTarget::PartialChunk{chunk, {}};
    pending->bytes.insert(pending->bytes.end(), piece.begin(), piece.end());
    if (pending->bytes.size() < grid.bytes(chunk)) continue;
    const std::vector<std::byte> whole = std::move(pending->bytes);
    pending.reset();
    lock.unlock();
    finish(chunk, whole, false);
  }
}

WriterState::BorrowedEncoder::BorrowedEncoder(WriterState& state) : state_(state) {
  const std::lock_guard lock(state.encoders_mutex);
  if (state.encoders.empty()) {
    encoder_ = std::make_unique<ChunkEncoder>(state.options.zstd_level.value());
  } else {
    encoder_ = std::move(state.encoders.back());
    state.encoders.pop_back();
  }
}

WriterState::BorrowedEncoder::~BorrowedEncoder() {
  const std::lock_guard lock(state_.encoders_mutex);
  try {
    state_.encoders.push_back(std::move(encoder_));
  } catch (const std::bad_alloc&) {
    encoder_.reset();  // made anew for the next chunk
  }
}

namespace {

// Writes whole tensors with all cores. The work is cut into pieces; small tensors that are neighbours in the file are
// written together. Checksums follow the pieces in their order (TensorTarget). The thread that finishes the next piece
// in order sums it while it is in cache, and then all finished pieces after it.

// Smaller tensors are joined in memory, up to one block.
constexpr std::uint64_t least_alone = std::uint64_t{64} << 10;

class WritingAll {
 public:
  WritingAll(StateFileWriter& writer, WriterState& state, std::span<const TensorView> tensors,
             const ProgressCallback& progress)
      : writer_(writer), state_(state), tensors_(tensors), progress_(progress, total(tensors)) {}

  void write() {
    plan();
    const bool is_compressing = state_.options.zstd_level.has_value();
    const std::size_t workers = is_compressing ? static_cast<std::size_t>(os::usable_cores()) : copy_workers();
    buffers_.resize(workers);
    parallel_for(tasks_.size(), workers, [&](std::size_t i, std::size_t worker) { run(tasks_[i], buffers_[worker]); });
  }

 private:
  enum class Kind : std::uint8_t {
    piece,  // part of a contiguous tensor, compressed or not
    whole,  // a strided tensor
    run,    // small neighbours
  };
  struct WriteTask {
    Kind kind;
    std::size_t tensor;
    std::uint64_t count;       // number of tensors of a run
    std::uint64_t offset = 0;  // offset of the piece
    std::uint64_t bytes = 0;
  };

  static std::uint64_t total(std::span<const TensorView> tensors) noexcept {
    std::uint64_t bytes = 0;
    for (const TensorView& tensor : tensors) bytes += tensor.nbytes();
    return bytes;
  }

  void plan() {
    const std::vector<StateTensor>& entries = state_.catalogue.tensors;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const std::uint64_t bytes = entries[i].bytes;
      if (bytes == 0) continue;
      if (!entries[i].compressed && bytes < least_alone) {
        add_to_run(i);
      } else if (!tensors_[i].is_contiguous()) {
        tasks_.push_back({Kind::whole, i, 0});
      } else {
        cut(i, entries[i]);
      }
    }
  }

  /// Cuts a tensor into its chunks, or at block boundaries of the file.
  void cut(std::size_t index, const StateTensor& entry) {
    std::optional<ChunkGrid> grid;
    if (entry.compressed) grid = state_.grid(index);
    for (std::uint64_t at = 0; at < entry.bytes; at += tasks_.back().bytes) {
      const std::uint64_t room =
          grid ? grid->bytes(grid->chunk_at(at)) : write_block - (entry.offset + at) % write_block;
      tasks_.push_back({Kind::piece, index, 0, at, std::min(room, entry.bytes - at)});
    }
  }

  void add_to_run(std::size_t index) {
    const StateTensor& entry = state_.catalogue.tensors[index];
    if (!tasks_.empty() && tasks_.back().kind == Kind::run && tasks_.back().tensor + tasks_.back().count == index) {
      const std::uint64_t begin = state_.catalogue.tensors[tasks_.back().tensor].offset;
      if (entry.offset / write_block == begin / write_block) {
        ++tasks_.back().count;
        return;
      }
    }
    tasks_.push_back({Kind::run, index, 1});
  }

  void run(const WriteTask& task, std::vector<std::byte>& buffer) {
    switch (task.kind) {
      case Kind::piece:
        state_.write_bytes(task.tensor, task.offset, tensors_[task.tensor].bytes().subspan(task.offset, task.bytes),
                           true);
        return progress_.add(task.bytes);
      case Kind::whole:
        writer_.write(task.tensor, tensors_[task.tensor]);
        return progress_.add(tensors_[task.tensor].nbytes());
      case Kind::run:
        return write_run(task.tensor, task.tensor + task.count, buffer);
    }
  }

  void write_run(std::size_t first, std::size_t end, std::vector<std::byte>& buffer) {
    const std::vector<StateTensor>& entries = state_.catalogue.tensors;
    const std::uint64_t begin = entries[first].offset;
    buffer.assign(entries[end - 1].offset + entries[end - 1].bytes - begin, std::byte{0});
    std::uint64_t bytes = 0;
    for (std::size_t i = first; i < end; ++i) {
      const std::span<std::byte> target = std::span(buffer).subspan(entries[i].offset - begin, entries[i].bytes);
      copy_contiguous(tensors_[i], target.data());
      state_.targets[i].set_checksum(tensor_checksum(target), target.size());
      state_.targets[i].count(target.size());
      bytes += target.size();
    }
    state_.put(begin, buffer);
    progress_.add(bytes);
  }

  StateFileWriter& writer_;
  WriterState& state_;
  std::span<const TensorView> tensors_;
  std::vector<WriteTask> tasks_;
  std::vector<std::vector<std::byte>> buffers_;
  ProgressCounter progress_;
};

}  // namespace
}  // namespace statefile

StateFileWriter::StateFileWriter(const std::string& path, const Config& config, std::vector<Entry> tensors,
                                 const StateFileOptions& options)
    : state_(std::make_unique<State>(path, config, std::move(tensors), options)) {}
StateFileWriter::StateFileWriter(StateFileWriter&&) noexcept = default;
StateFileWriter& StateFileWriter::operator=(StateFileWriter&&) noexcept = default;
StateFileWriter::~StateFileWriter() = default;

void StateFileWriter::write(std::size_t index, std::uint64_t offset, std::span<const std::byte> bytes) {
  state_->write_piece(index, offset, bytes);
}

void StateFileWriter::write(std::size_t index, const TensorView& tensor) {
  state_->check_announced(index, tensor);
  if (tensor.is_contiguous()) return state_->write_piece(index, 0, tensor.bytes());
  std::vector<std::byte> buffer;
  const auto item = static_cast<std::int64_t>(itemsize(tensor.dtype()));
  const std::int64_t step = static_cast<std::int64_t>(statefile::gathered_bytes) / item;
  for (std::int64_t begin = 0; begin < tensor.element_count(); begin += step) {
    const std::int64_t end = std::min(begin + step, tensor.element_count());
    buffer.resize(static_cast<std::size_t>((end - begin) * item));
    core::copy_elements(tensor, begin, end, buffer.data());
    state_->write_piece(index, static_cast<std::uint64_t>(begin * item), buffer);
  }
}

void StateFileWriter::write_all(std::span<const TensorView> tensors, const ProgressCallback& progress) {
  if (tensors.size() != state_->catalogue.tensors.size())
    statefile::refuse_writing(state_->file.path(), fmt::format("{} tensors were announced, and {} were received",
                                                               state_->catalogue.tensors.size(), tensors.size()));
  for (std::size_t i = 0; i < tensors.size(); ++i) state_->check_announced(i, tensors[i]);
  state_->change([&] { statefile::WritingAll(*this, *state_, tensors, progress).write(); });
}

std::optional<std::uint64_t> StateFileWriter::file_offset(std::size_t index) const {
  const StateTensor& tensor = state_->announced(index);
  if (tensor.compressed) return std::nullopt;
  return tensor.offset;
}

const std::string& StateFileWriter::temporary_path() const noexcept {
  return state_->temporary;
}

void StateFileWriter::mark_written(std::size_t index) {
  const StateTensor& tensor = state_->announced(index);
  if (tensor.compressed)
    state_->refuse(tensor, "it is compressed, so that another writer cannot know the offset of its bytes");
  if (state_->targets[index].written() != 0 && tensor.bytes != 0)
    state_->refuse(tensor, "this writer has written some of its bytes");
  state_->targets[index].count(tensor.bytes);
}

void StateFileWriter::commit() {
  const trace::Span span(trace::SpanKind::file, "commit state file");
  state_->commit();
}

void write_state_file(const std::string& path, const Config& config, std::span<const NamedTensor> weights,
                      const StateFileOptions& options, const ProgressCallback& progress) {
  std::vector<StateFileWriter::Entry> entries;
  std::vector<TensorView> tensors;
  entries.reserve(weights.size());
  tensors.reserve(weights.size());
  for (const auto& [name, tensor] : weights) {
    entries.push_back({name, tensor.dtype(), tensor.shape()});
    tensors.push_back(tensor.view());
  }
  trace::Span span(trace::SpanKind::file, "write state file");
  for (const TensorView& tensor : tensors) span.add_bytes(tensor.nbytes());
  StateFileWriter writer(path, config, std::move(entries), options);
  writer.write_all(tensors, progress);
  writer.commit();
}

}  // namespace muster
