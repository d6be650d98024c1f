// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/merged_tensor.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "muster/error.hpp"
#include "src/core/quoted.hpp"
#include "src/merge/reduce.hpp"
#include "src/os/file.hpp"

namespace muster {
namespace {

// What is smaller is not worth a system call: to be brought into memory at once, and to be given back.
constexpr std::size_t least_populated = std::size_t{1} << 20;
constexpr std::size_t least_forgotten = std::size_t{64} << 10;

/// A part of a source; pages of a mapping are given back at its end. `dense`: all of them are wanted.
class Part {
 public:
  Part(const AssemblySource& source, std::uint64_t offset, std::uint64_t length, bool dense = true) {
    if (source.read) {
      read_.resize(length);
      source.read(offset, read_);
      bytes_ = read_;
      return;
    }
    bytes_ = source.tensor.bytes().subspan(offset, length);
    is_mapped_ = !source.file.empty();
    if (is_mapped_ && dense && length >= least_populated) os::populate_mapped(bytes_, source.file);
  }
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;
  ~Part() {
    if (is_mapped_ && bytes_.size() >= least_forgotten) os::forget_mapped(bytes_);
  }
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return bytes_; }

 private:
  std::vector<std::byte> read_;
  std::span<const std::byte> bytes_;
  bool is_mapped_ = false;
};

void copy(const MergedTensor& tensor, const merge::Rows& rows, std::uint64_t offset, std::span<std::byte> target) {
  std::memset(target.data(), 0, target.size());
  for (const merge::Rectangle& part : merge::rectangles(rows, offset, offset + target.size())) {
    if (part.rows == 0 || part.bytes == 0) continue;
    const std::uint64_t span = (part.rows - 1) * part.from_stride + part.bytes;
    // Rows far apart have pages between them that nobody wants.
    const bool is_dense = part.bytes * 2 >= part.from_stride;
    const Part source(tensor.sources[static_cast<std::size_t>(part.source)], part.from, span, is_dense);
    for (std::uint64_t row = 0; row < part.rows; ++row)
      std::memcpy(target.data() + part.to + row * part.to_stride, source.bytes().data() + row * part.from_stride,
                  part.bytes);
  }
}

void compare(const MergedTensor& tensor, std::uint64_t offset, std::uint64_t length) {
  const auto check = [&](std::size_t first, std::size_t other) {
    // Ranks of one part of a tensor have fewer bytes than the whole: their share of the window is compared. Where one
    // window ends the next begins, however that is rounded.
    const std::uint64_t size = tensor.sources[first].nbytes();
    const std::uint64_t whole = byte_size(tensor.layout.target.dtype, tensor.layout.target.shape);
    const auto share = [&](std::uint64_t at) {
      if (at == whole) return size;
      const double part = static_cast<double>(at) / static_cast<double>(whole) * static_cast<double>(size);
      return std::min(static_cast<std::uint64_t>(part), size);
    };
    const std::uint64_t begin = share(offset);
    const std::uint64_t end = share(offset + length);
    if (begin == end) return;
    const Part a(tensor.sources[first], begin, end - begin);
    const Part b(tensor.sources[other], begin, end - begin);
    if (std::memcmp(a.bytes().data(), b.bytes().data(), a.bytes().size()) == 0) return;
    throw Error(ErrorKind::rank_mismatch,
                fmt::format("the tensor {}: ranks {} and {} must have the same and have other values",
                            in_quotes(tensor.name), tensor.ranks[first], tensor.ranks[other]),
                {.rank = tensor.ranks[other]});
  };
  if (!tensor.layout.pieces.empty()) {
    const auto first = static_cast<std::size_t>(tensor.layout.pieces.front().source);
    for (const int other : tensor.layout.must_equal) check(first, static_cast<std::size_t>(other));
  }
  for (const auto& [first, other] : tensor.equal) check(first, other);
}

}  // namespace

void read_merged(const MergedTensor& tensor, const merge::Rows& rows, std::uint64_t offset,
                 std::span<std::byte> target) {
  compare(tensor, offset, target.size());
  if (target.empty()) return;
  if (tensor.layout.combine == merge::Combine::copy) return copy(tensor, rows, offset, target);
  // Max and sum: the same window of every source, and a piece a source in the order of ranks.
  std::vector<std::unique_ptr<Part>> parts;
  std::vector<const std::byte*> sources;
  for (const merge::Piece& piece : tensor.layout.pieces) {
    const AssemblySource& source = tensor.sources[static_cast<std::size_t>(piece.source)];
    sources.push_back(parts.emplace_back(std::make_unique<Part>(source, offset, target.size()))->bytes().data());
  }
  merge::reduce(tensor.layout.combine, tensor.layout.target.dtype, target, sources);
}

}  // namespace muster
