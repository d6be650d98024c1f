// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <algorithm>
#include <optional>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/core/element_range.hpp"
#include "src/core/quoted.hpp"
#include "src/statefile/hdf5_library.hpp"
#include "src/statefile/writer_state.hpp"

namespace muster {
namespace statefile {
namespace {

// Of a strided tensor: what is put together in memory at once.
constexpr std::uint64_t gathered_bytes = write_block;

// HDF5 has 32 bits for the length of a string.
constexpr std::size_t largest_config = std::size_t{1} << 31;

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
  [[noreturn]] void refuse(const std::string& words) const { refuse_writing(path_, words); }

  void check_options() const {
    if (options_.info.world_size < 1 || options_.info.rank < 0 || options_.info.rank >= options_.info.world_size)
      refuse(fmt::format("there is no rank {} of {}", options_.info.rank, options_.info.world_size));
    if (options_.zstd_level && !is_zstd_level(*options_.zstd_level))
      refuse(fmt::format("zstd has no level {} (1 to 22)", *options_.zstd_level));
    if (options_.chunk_bytes < least_chunk || options_.chunk_bytes > largest_chunk)
      refuse(fmt::format("chunks have between {} bytes and 64 MiB, not {}", least_chunk, options_.chunk_bytes));
  }

  void add(StateFileWriter::Entry entry) {
    if (entry.name.empty() || entry.name.find('\0') != std::string::npos || !is_utf8(entry.name))
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

void refuse_writing(const std::string& path, const std::string& words) {
  throw Error(ErrorKind::argument, fmt::format("writing the state file {}: {}", in_quotes(path), words),
              {.path = path});
}

Placement place_tensors(std::vector<StateFileWriter::Entry> entries, const StateFileOptions& options,
                        const std::string& path) {
  return Placing(options, path).place(std::move(entries));
}

void TensorTarget::add_to_checksum(std::uint64_t offset, std::span<const std::byte> bytes, std::uint64_t total) {
  const std::lock_guard lock(mutex_);
  if (offset != summed_ || bytes.empty()) return;
  if (offset == 0 && bytes.size() == total) {
    whole_ = tensor_checksum(bytes);
  } else {
    if (sum_ == nullptr) sum_ = std::make_unique<TensorChecksum>();
    sum_->add(bytes);
  }
  summed_ += bytes.size();
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
        Placement placement = place_tensors(std::move(entries), options, path);
        catalogue = std::move(placement.catalogue);
        data_end = placement.data_end;
        require_hdf5();
        return os::OutputFile(path, options.temporary);
      }()),
      temporary(file.temporary()) {
  if (config_text.size() > largest_config)
    refuse_writing(path, fmt::format("a config of {} bytes is too large for HDF5; {} are possible", config_text.size(),
                                     largest_config));
  targets = std::make_unique<TensorTarget[]>(catalogue.tensors.size());
  // A disk that is too small is known before the work.
  file.reserve(data_end);
}

void WriterState::refuse(const StateTensor& tensor, const std::string& words) const {
  refuse_writing(file.path(), fmt::format("tensor {}: {}", in_quotes(tensor.name), words));
}

void WriterState::require_writing() const {
  if (is_committed || has_failed)
    throw Error(ErrorKind::argument,
                fmt::format("the state file {} {}", in_quotes(file.path()),
                            is_committed ? "is finished already"
                                         : "cannot be finished: writing it has failed; begin again with a new writer"),
                {.path = file.path()});
}

const StateTensor& WriterState::announced(std::size_t index) const {
  require_writing();
  if (index >= catalogue.tensors.size())
    refuse_writing(file.path(),
                   fmt::format("{} tensors were announced, no number {}", catalogue.tensors.size(), index));
  return catalogue.tensors[index];
}

void WriterState::check_announced(std::size_t index, const TensorView& tensor) const {
  const StateTensor& entry = announced(index);
  if (tensor.dtype() != entry.dtype || tensor.shape() != entry.shape)
    refuse(entry, fmt::format("it was announced as {} {}, not as {} {}", to_string(entry.dtype), to_string(entry.shape),
                              to_string(tensor.dtype()), to_string(tensor.shape())));
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
  // The disk begins while other pieces are still copied and summed: half of the way is done when fdatasync is called.
  if (options.durable) file.start_writeback(at, bytes.size());
  targets[index].count(bytes.size());
}

void WriterState::write_piece(std::size_t index, std::uint64_t offset, std::span<const std::byte> bytes) {
  const StateTensor& tensor = announced(index);
  if (offset > tensor.bytes || bytes.size() > tensor.bytes - offset)
    refuse(tensor, fmt::format("{} bytes at {} are past the end of its {}", bytes.size(), offset, tensor.bytes));
  if (bytes.empty()) return;
  change([&] {
    if (tensor.compressed) return write_compressed(index, offset, bytes);
    // Block by block: each is summed while the processor still has it.
    while (!bytes.empty()) {
      const std::uint64_t room = write_block - (tensor.offset + offset) % write_block;
      const auto piece = bytes.first(std::min<std::uint64_t>(room, bytes.size()));
      write_plain(index, offset, piece);
      targets[index].add_to_checksum(offset, piece, tensor.bytes);
      offset += piece.size();
      bytes = bytes.subspan(piece.size());
    }
  });
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

void WriterState::write_compressed(std::size_t index, std::uint64_t offset, std::span<const std::byte> bytes) {
  const StateTensor& tensor = catalogue.tensors[index];
  TensorTarget& target = targets[index];
  const ChunkGrid grid = this->grid(index);
  const BorrowedEncoder encoder(*this);
  const auto finish = [&](std::uint64_t chunk, std::span<const std::byte> elements) {
    write_chunk(index, grid, chunk, elements, *encoder);
    target.add_to_checksum(grid.begin(chunk), elements, tensor.bytes);
  };
  while (!bytes.empty()) {
    const std::uint64_t chunk = grid.chunk_at(offset);
    const std::uint64_t into = offset - grid.begin(chunk);
    const auto piece = bytes.first(std::min<std::uint64_t>(grid.bytes(chunk) - into, bytes.size()));
    offset += piece.size();
    bytes = bytes.subspan(piece.size());
    if (piece.size() == grid.bytes(chunk)) {
      finish(chunk, piece);
      continue;
    }
    std::unique_lock lock(target.mutex());
    std::optional<TensorTarget::Pending>& pending = target.pending();
    const bool is_next = into == 0 ? !pending : pending && pending->chunk == chunk && pending->bytes.size() == into;
    if (!is_next)
      refuse(tensor, "pieces of a compressed tensor come in ascending order, or begin and end where its chunks do");
    if (!pending) pending = TensorTarget::Pending{chunk, {}};
    pending->bytes.insert(pending->bytes.end(), piece.begin(), piece.end());
    if (pending->bytes.size() < grid.bytes(chunk)) continue;
    const std::vector<std::byte> whole = std::move(pending->bytes);
    pending.reset();
    lock.unlock();
    finish(chunk, whole);
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
    encoder_.reset();  // the next one is made anew
  }
}

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
  for (std::int64_t begin = 0; begin < tensor.elements(); begin += step) {
    const std::int64_t end = std::min(begin + step, tensor.elements());
    buffer.resize(static_cast<std::size_t>((end - begin) * item));
    core::copy_elements(tensor, begin, end, buffer.data());
    state_->write_piece(index, static_cast<std::uint64_t>(begin * item), buffer);
  }
}

std::optional<std::uint64_t> StateFileWriter::place(std::size_t index) const {
  const StateTensor& tensor = state_->announced(index);
  if (tensor.compressed) return std::nullopt;
  return tensor.offset;
}

const std::string& StateFileWriter::temporary_path() const noexcept {
  return state_->temporary;
}

void StateFileWriter::written_elsewhere(std::size_t index) {
  const StateTensor& tensor = state_->announced(index);
  if (tensor.compressed) state_->refuse(tensor, "it is compressed, so nobody else can know where its bytes belong");
  if (state_->targets[index].written() != 0 && tensor.bytes != 0)
    state_->refuse(tensor, "some of its bytes were written here");
  state_->targets[index].count(tensor.bytes);
}

void StateFileWriter::commit() {
  state_->commit();
}

void write_state_file(const std::string& path, const Config& config, std::span<const NamedTensor> weights,
                      const StateFileOptions& options) {
  std::vector<StateFileWriter::Entry> entries;
  std::vector<TensorView> tensors;
  entries.reserve(weights.size());
  tensors.reserve(weights.size());
  for (const auto& [name, tensor] : weights) {
    entries.push_back({name, tensor.dtype(), tensor.shape()});
    tensors.push_back(tensor.view());
  }
  StateFileWriter writer(path, config, std::move(entries), options);
  writer.write_all(tensors);
  writer.commit();
}

}  // namespace muster
