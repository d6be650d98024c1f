// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/tensor_source.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "muster/error.hpp"
#include "src/core/quoted.hpp"
#include "src/merge/reduce.hpp"

namespace muster {
namespace {

constexpr std::uint64_t read_at_once = 1 << 20;
// Longer rows are worth a system call each.
constexpr std::uint64_t long_row = 128 << 10;

/// The rows from `begin` on, `stride` apart, must be within `size`.
void check_extent(std::uint64_t begin, std::uint64_t stride, const merge::Rectangle& rows, std::uint64_t size) {
  std::uint64_t length = 0;
  if (rows.rows == 0 || __builtin_mul_overflow(rows.rows - 1, stride, &length) ||
      __builtin_add_overflow(length, rows.bytes, &length) || begin > size || length > size - begin)
    throw Error(ErrorKind::corrupt, "rows that are to be copied lie outside of their tensor or their window");
}

}  // namespace

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
    throw Error(ErrorKind::corrupt, "rows are to be copied of a tensor that there is none of");
  begin += rows.from;
  check_extent(begin, rows.from_stride, rows, source.tensors()[tensor].bytes);
  check_extent(rows.to, rows.to_stride, rows, target.size());
  std::byte* to = target.data() + rows.to;
  if (rows.from_stride == rows.bytes && rows.to_stride == rows.bytes) {
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

MergedTensors::MergedTensors(std::shared_ptr<const TensorSource> source, std::vector<MergedTensor> tensors)
    : source_(std::move(source)), tensors_(std::move(tensors)) {
  rows_.reserve(tensors_.size());
  entries_.reserve(tensors_.size());
  for (const MergedTensor& tensor : tensors_) {
    rows_.push_back(merge::rows_of(tensor.layout));
    const TensorSpec& spec = tensor.layout.target;
    entries_.push_back({tensor.name, spec.dtype, spec.shape, 0, byte_size(spec.dtype, spec.shape)});
  }
}

void MergedTensors::read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const {
  compare(tensor, offset, target.size());
  if (target.empty()) return;
  const MergedTensor& merged = tensors_[tensor];
  if (merged.layout.combine == merge::Combine::copy) {
    std::memset(target.data(), 0, target.size());
    for (const merge::Rectangle& rows : merge::rectangles(rows_[tensor], offset, offset + target.size())) {
      if (rows.rows == 0 || rows.bytes == 0) continue;
      const TensorPart& part = merged.parts[static_cast<std::size_t>(rows.source)];
      read_rows(*source_, part.tensor, part.begin, rows, target);
    }
    return;
  }
  // Max and sum: the same window of every part, in the order of ranks.
  std::vector<std::vector<std::byte>> windows;
  for (const merge::Piece& piece : merged.layout.pieces) {
    const TensorPart& part = merged.parts[static_cast<std::size_t>(piece.source)];
    source_->read_piece(part.tensor, part.begin + offset, target.size(), windows.emplace_back());
  }
  std::vector<const std::byte*> from;
  from.reserve(windows.size());
  for (const std::vector<std::byte>& window : windows) from.push_back(window.data());
  merge::reduce(merged.layout.combine, merged.layout.target.dtype, target, from);
}

TensorDetail MergedTensors::detail(std::size_t tensor) const {
  TensorDetail detail;
  std::set<std::string_view> files;
  for (const TensorPart& part : tensors_[tensor].parts) {
    files.insert(source_->detail(part.tensor).file);
    detail.stored_bytes += part.bytes;
  }
  if (files.size() == 1) detail.file = *files.begin();
  return detail;
}

void MergedTensors::compare(std::size_t tensor, std::uint64_t offset, std::uint64_t length) const {
  const MergedTensor& merged = tensors_[tensor];
  const std::uint64_t whole = entries_[tensor].bytes;
  const auto check = [&](const TensorPart& first, const TensorPart& other) {
    // Parts of a tensor have fewer bytes than the whole: their share of the window is compared. Where one window ends
    // the next begins, however that is rounded.
    const auto share = [&](std::uint64_t at) {
      if (at == whole) return first.bytes;
      const double part = static_cast<double>(at) / static_cast<double>(whole) * static_cast<double>(first.bytes);
      return std::min(static_cast<std::uint64_t>(part), first.bytes);
    };
    const std::uint64_t begin = share(offset);
    const std::uint64_t end = share(offset + length);
    if (begin == end) return;
    std::vector<std::byte> a;
    std::vector<std::byte> b;
    source_->read_piece(first.tensor, first.begin + begin, end - begin, a);
    source_->read_piece(other.tensor, other.begin + begin, end - begin, b);
    if (a == b) return;
    throw Error(ErrorKind::rank_mismatch,
                fmt::format("the tensor {}: ranks {} and {} must have the same and have other values",
                            in_quotes(merged.name), first.rank, other.rank),
                {.rank = other.rank});
  };
  if (!merged.layout.pieces.empty()) {
    const auto first = static_cast<std::size_t>(merged.layout.pieces.front().source);
    for (const int other : merged.layout.must_equal)
      check(merged.parts[first], merged.parts[static_cast<std::size_t>(other)]);
  }
  for (const auto& [first, other] : merged.equal) check(first, other);
}

}  // namespace muster
