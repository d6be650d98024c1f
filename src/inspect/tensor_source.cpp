// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/tensor_source.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "muster/error.hpp"
#include "src/core/quoted.hpp"
#include "src/merge/reduce.hpp"
#include "src/os/file.hpp"

namespace muster::inspect {
namespace {

// What is smaller is not worth a system call: to be brought into memory at once, and to be given back.
constexpr std::size_t least_populated = std::size_t{1} << 20;
constexpr std::size_t least_forgotten = std::size_t{64} << 10;

/// Bytes of a mapping, whose pages are given back at its end. `dense`: all of them are wanted.
class Mapped {
 public:
  Mapped(std::span<const std::byte> bytes, const std::string& file, bool dense = true) : bytes_(bytes) {
    if (dense && bytes_.size() >= least_populated) os::populate_mapped(bytes_, file);
  }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;
  ~Mapped() {
    if (bytes_.size() >= least_forgotten) os::forget_mapped(bytes_);
  }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace

PieceBytes::~PieceBytes() {
  if (is_mapped_ && bytes_.size() >= least_forgotten) os::forget_mapped(bytes_);
}

MergedSource::MergedSource(std::vector<MergedTensor> tensors, std::map<std::string, std::string> metadata)
    : tensors_(std::move(tensors)), metadata_(std::move(metadata)) {
  rows_.reserve(tensors_.size());
  entries_.reserve(tensors_.size());
  for (const MergedTensor& tensor : tensors_) {
    rows_.push_back(merge::rows_of(tensor.layout));
    const TensorSpec& spec = tensor.layout.target;
    entries_.push_back({tensor.name, spec.dtype, spec.shape, 0, byte_size(spec.dtype, spec.shape)});
  }
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (!index_.emplace(entries_[i].name, i).second)
      throw Error(ErrorKind::argument,
                  fmt::format("the tensor {} has two sources of this one name", in_quotes(entries_[i].name)));
  }
}

std::optional<std::size_t> MergedSource::find(std::string_view name) const noexcept {
  const auto found = index_.find(name);
  if (found == index_.end()) return std::nullopt;
  return found->second;
}

std::unique_ptr<PieceBytes> MergedSource::read(std::size_t tensor, std::uint64_t offset, std::uint64_t length) const {
  const MergedTensor& merged = tensors_[tensor];
  compare(merged, offset, length);
  if (merged.layout.combine == merge::Combine::copy) {
    std::vector<std::byte> target(length);
    copy(merged, rows_[tensor], offset, target);
    return std::make_unique<PieceBytes>(std::move(target));
  }
  // Max and sum: the same window of every source, and a piece a source in the order of ranks.
  std::vector<const std::byte*> sources;
  std::vector<std::unique_ptr<Mapped>> mapped;
  for (const merge::Piece& piece : merged.layout.pieces) {
    const auto source = static_cast<std::size_t>(piece.source);
    const std::span<const std::byte> bytes = merged.sources[source].bytes().subspan(offset, length);
    mapped.push_back(std::make_unique<Mapped>(bytes, merged.files[source]));
    sources.push_back(bytes.data());
  }
  std::vector<std::byte> target(length);
  merge::reduce(merged.layout.combine, merged.layout.target.dtype, target, sources);
  return std::make_unique<PieceBytes>(std::move(target));
}

void MergedSource::copy(const MergedTensor& tensor, const merge::Rows& rows, std::uint64_t offset,
                        std::span<std::byte> target) const {
  for (const merge::Rectangle& part : merge::rectangles(rows, offset, offset + target.size())) {
    if (part.rows == 0 || part.bytes == 0) continue;
    const auto source = static_cast<std::size_t>(part.source);
    const std::uint64_t span = (part.rows - 1) * part.from_stride + part.bytes;
    const std::span<const std::byte> bytes = tensor.sources[source].bytes().subspan(part.from, span);
    // Rows far apart have pages between them that nobody wants.
    const bool is_dense = part.bytes * 2 >= part.from_stride;
    const Mapped mapped(bytes, tensor.files[source], is_dense);
    for (std::uint64_t row = 0; row < part.rows; ++row)
      std::memcpy(target.data() + part.to + row * part.to_stride, bytes.data() + row * part.from_stride, part.bytes);
  }
}

void MergedSource::compare(const MergedTensor& tensor, std::uint64_t offset, std::uint64_t length) const {
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
    const std::span<const std::byte> a = tensor.sources[first].bytes().subspan(begin, end - begin);
    const std::span<const std::byte> b = tensor.sources[other].bytes().subspan(begin, end - begin);
    const Mapped mapped_a(a, tensor.files[first]);
    const Mapped mapped_b(b, tensor.files[other]);
    if (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0) return;
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

TensorDetail MergedSource::detail(std::size_t tensor) const {
  const MergedTensor& merged = tensors_[tensor];
  TensorDetail detail;
  for (const Tensor& source : merged.sources) detail.stored_bytes += source.nbytes();
  if (std::set<std::string>(merged.files.begin(), merged.files.end()).size() == 1) detail.file = merged.files.front();
  return detail;
}

}  // namespace muster::inspect
