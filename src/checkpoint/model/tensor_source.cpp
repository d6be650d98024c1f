// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/model/tensor_source.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/core/checksum.hpp"
#include "src/merge/reduce.hpp"
#include "src/trace/span.hpp"

namespace muster {
namespace {

constexpr std::uint64_t read_at_once = 1 << 20;
constexpr std::uint64_t written_at_once = 8 << 20;
// Longer rows are read with one system call each.
constexpr std::uint64_t long_row = 128 << 10;

}  // namespace

void check_extent(std::uint64_t begin, std::uint64_t stride, const merge::Rectangle& rows, std::uint64_t size) {
  std::uint64_t length = 0;
  if (rows.rows == 0 || __builtin_mul_overflow(rows.rows - 1, stride, &length) ||
      __builtin_add_overflow(length, rows.bytes, &length) || begin > size || length > size - begin)
    throw Error(ErrorKind::corrupt, "internal error: rows to copy are out of range of their tensor or window");
}

const Omissions& TensorSource::omissions() const noexcept {
  static const Omissions none;
  return none;
}

std::optional<std::size_t> TensorSource::find(std::string_view name) const noexcept {
  const auto found = std::ranges::find(tensors(), name, &TensorEntry::name);
  if (found == tensors().end()) return std::nullopt;
  return static_cast<std::size_t>(found - tensors().begin());
}

std::span<const std::byte> TensorSource::read_piece(std::size_t tensor, std::uint64_t offset, std::uint64_t length,
                                                    std::vector<std::byte>& memory) const {
  if (memory.size() < length) memory.resize(length);
  const std::span<std::byte> piece(memory.data(), length);
  read(tensor, offset, piece);
  return piece;
}

void read_rows(const TensorSource& source, std::size_t tensor, std::uint64_t begin, const merge::Rectangle& rows,
               std::span<std::byte> target) {
  if (tensor >= source.tensors().size())
    throw Error(ErrorKind::corrupt, "internal error: the tensor of the rows to copy does not exist");
  begin += rows.from;
  check_extent(begin, rows.from_stride, rows, source.tensors()[tensor].bytes);
  check_extent(rows.to, rows.to_stride, rows, target.size());
  std::byte* to = target.data() + rows.to;
  if (const std::span<const std::byte> whole = source.memory(tensor); !whole.empty()) {
    if (rows.from_stride == rows.bytes && rows.to_stride == rows.bytes) {
      std::memcpy(to, whole.data() + begin, rows.rows * rows.bytes);
    } else {
      for (std::uint64_t row = 0; row < rows.rows; ++row)
        std::memcpy(to + row * rows.to_stride, whole.data() + begin + row * rows.from_stride, rows.bytes);
    }
  } else if (rows.from_stride == rows.bytes && rows.to_stride == rows.bytes) {
    source.read(tensor, begin, {to, rows.rows * rows.bytes});
  } else if (rows.bytes >= long_row || rows.rows == 1) {
    for (std::uint64_t row = 0; row < rows.rows; ++row)
      source.read(tensor, begin + row * rows.from_stride, {to + row * rows.to_stride, rows.bytes});
  } else {
    const std::uint64_t at_once =
        std::clamp<std::uint64_t>(read_at_once / std::max<std::uint64_t>(rows.from_stride, 1), 1, rows.rows);
    const auto memory = std::make_unique_for_overwrite<std::byte[]>((at_once - 1) * rows.from_stride + rows.bytes);
    for (std::uint64_t row = 0; row < rows.rows; row += at_once) {
      const std::uint64_t now = std::min(at_once, rows.rows - row);
      source.read(tensor, begin + row * rows.from_stride, {memory.get(), (now - 1) * rows.from_stride + rows.bytes});
      for (std::uint64_t i = 0; i < now; ++i)
        std::memcpy(to + (row + i) * rows.to_stride, memory.get() + i * rows.from_stride, rows.bytes);
    }
  }
}

void for_each_piece(const TensorSource& source, bool in_order, ProgressCounter& progress,
                    const std::function<void(std::size_t, std::uint64_t, std::span<const std::byte>)>& write) {
  struct ReadPiece {
    std::size_t tensor = 0;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
  };
  const std::vector<TensorEntry>& tensors = source.tensors();
  std::vector<ReadPiece> pieces;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::uint64_t most = in_order ? tensors[i].bytes : written_at_once;
    for (std::uint64_t at = 0; at < tensors[i].bytes; at += most)
      pieces.push_back({i, at, std::min(most, tensors[i].bytes - at)});
  }
  // The largest first, so that no thread is left alone with a large one at the end.
  if (in_order) std::ranges::stable_sort(pieces, std::greater(), &ReadPiece::bytes);
  std::vector<std::vector<std::byte>> memory(copy_workers());
  parallel_for(pieces.size(), memory.size(), [&](std::size_t index, std::size_t worker) {
    const ReadPiece& piece = pieces[index];
    const std::optional<std::uint64_t> wanted = in_order ? source.detail(piece.tensor).checksum : std::nullopt;
    TensorChecksum sum;
    for (std::uint64_t at = piece.offset; at < piece.offset + piece.bytes; at += written_at_once) {
      const std::uint64_t length = std::min(written_at_once, piece.offset + piece.bytes - at);
      const std::span<const std::byte> bytes = source.read_piece(piece.tensor, at, length, memory[worker]);
      if (wanted) sum.add(bytes);
      write(piece.tensor, at, bytes);
      progress.add(length);
    }
    if (wanted && sum.value() != *wanted)
      throw Error(ErrorKind::corrupt,
                  fmt::format("tensor {}: checksum mismatch: data is corrupted. Copy the file again",
                              in_quotes(tensors[piece.tensor].name)));
  });
}

void write_state_file(const TensorSource& source, const std::string& path, const Config& config,
                      const StateFileOptions& options, ProgressCounter& progress) {
  std::vector<StateFileWriter::Entry> entries;
  for (const TensorEntry& entry : source.tensors()) entries.push_back({entry.name, entry.dtype, entry.shape});
  trace::Span span(trace::SpanKind::file, "write state file");
  StateFileWriter writer(path, config, std::move(entries), options);
  // Pieces that do not end at a chunk boundary must be written in order.
  const bool has_checksum = !source.tensors().empty() && source.detail(0).checksum.has_value();
  for_each_piece(source, options.zstd_level.has_value() || has_checksum, progress,
                 [&](std::size_t tensor, std::uint64_t offset, std::span<const std::byte> bytes) {
                   writer.write(tensor, offset, bytes);
                 });
  for (const TensorEntry& entry : source.tensors()) span.add_bytes(entry.bytes);
  writer.commit();
}

std::vector<RankSources> sources_by_rank(std::span<const std::size_t> counts, int processes) {
  std::vector<RankSources> ranks(counts.size());
  for (std::size_t rank = 0; rank < counts.size(); ++rank) {
    ranks[rank].process = static_cast<int>(rank) % processes;
    const auto before = static_cast<std::ptrdiff_t>(rank) - processes;
    if (before < 0) continue;
    const auto last = static_cast<std::size_t>(before);
    ranks[rank].first = ranks[last].first + static_cast<std::uint32_t>(counts[last]);
  }
  return ranks;
}

MergedTensors::MergedTensors(std::shared_ptr<const TensorSource> source, std::vector<RankSources> ranks,
                             std::vector<MergedTensor> tensors, std::vector<std::vector<SourceRef>> equal)
    : source_(std::move(source)), ranks_(std::move(ranks)), tensors_(std::move(tensors)), equal_(std::move(equal)) {
  bands_.reserve(tensors_.size());
  entries_.reserve(tensors_.size());
  for (const MergedTensor& tensor : tensors_) {
    bands_.push_back(merge::bands_of(tensor.layout));
    const TensorSpec& spec = tensor.layout.target;
    entries_.push_back({tensor.name, spec.dtype, spec.shape, 0, byte_size(spec.dtype, spec.shape)});
  }
}

std::size_t MergedTensors::place_of(const SourceRef& ref) const {
  return ranks_[static_cast<std::size_t>(ref.rank)].first + ref.index;
}

std::uint64_t MergedTensors::bytes_of(const SourceRef& ref) const {
  return ref.bytes != 0 ? ref.bytes : source_->tensors()[place_of(ref)].bytes;
}

void MergedTensors::read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const {
  compare(tensor, offset, target.size());
  if (target.empty()) return;
  const MergedTensor& merged = tensors_[tensor];
  if (merged.layout.combine == merge::Combine::copy) {
    std::memset(target.data(), 0, target.size());
    for (const merge::Band& band : bands_[tensor]) {
      const std::uint64_t begin = std::max(offset, band.at);
      const std::uint64_t end = std::min(offset + target.size(), band.at + band.rows.bytes());
      if (begin >= end) continue;
      for (const merge::Rectangle& rows : merge::rectangles(band.rows, begin - band.at, end - band.at)) {
        if (rows.rows == 0 || rows.bytes == 0) continue;
        const SourceRef& ref = merged.sources[static_cast<std::size_t>(rows.source)];
        read_rows(*source_, place_of(ref), ref.begin, rows, target.subspan(begin - offset, end - begin));
      }
    }
    return;
  }
  // Max and sum: the same window of every source, in the order of ranks.
  std::vector<std::vector<std::byte>> windows;
  for (const merge::UnitRange& piece : merged.layout.pieces) {
    const SourceRef& ref = merged.sources[static_cast<std::size_t>(piece.source)];
    source_->read_piece(place_of(ref), ref.begin + offset, target.size(), windows.emplace_back());
  }
  std::vector<const std::byte*> from;
  from.reserve(windows.size());
  for (const std::vector<std::byte>& window : windows) from.push_back(window.data());
  merge::reduce(merged.layout.combine, merged.layout.target.dtype, target, from);
}

TensorDetail MergedTensors::detail(std::size_t tensor) const {
  TensorDetail detail;
  std::set<std::string_view> files;
  for (const SourceRef& ref : tensors_[tensor].sources) {
    files.insert(source_->detail(place_of(ref)).file);
    detail.stored_bytes += bytes_of(ref);
  }
  if (files.size() == 1) detail.file = *files.begin();
  return detail;
}

void MergedTensors::compare(std::size_t tensor, std::uint64_t offset, std::uint64_t length) const {
  const std::uint64_t whole = entries_[tensor].bytes;
  for (const std::uint32_t number : tensors_[tensor].equal) {
    const std::vector<SourceRef>& set = equal_[number];
    const SourceRef& first = set.front();
    // Parts of a tensor have fewer bytes than the whole, so a proportional range is compared, in whole elements.
    // Rounding is consistent: each range begins where the previous one ends.
    const std::uint64_t bytes = bytes_of(first);
    const DType dtype = source_->tensors()[place_of(first)].dtype;
    const std::uint64_t item = is_packed(dtype) ? 1 : itemsize(dtype);
    const auto share = [&](std::uint64_t at) {
      if (at == whole) return bytes;
      const double part = static_cast<double>(at) / static_cast<double>(whole) * static_cast<double>(bytes);
      return std::min(static_cast<std::uint64_t>(part), bytes) / item * item;
    };
    const std::uint64_t begin = share(offset);
    const std::uint64_t end = share(offset + length);
    if (begin == end) continue;
    std::vector<std::byte> a;
    std::vector<std::byte> b;
    source_->read_piece(place_of(first), first.begin + begin, end - begin, a);
    for (const SourceRef& other : std::span(set).subspan(1)) {
      source_->read_piece(place_of(other), other.begin + begin, end - begin, b);
      if (a != b)
        throw Error(ErrorKind::rank_mismatch,
                    fmt::format("tensor {}: ranks {} and {} have different values, but must have the same",
                                in_quotes(tensors_[tensor].name), first.rank, other.rank),
                    {.rank = other.rank});
    }
  }
}

}  // namespace muster
