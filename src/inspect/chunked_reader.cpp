// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/chunked_reader.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "muster/error.hpp"
#include "src/core/quoted.hpp"

namespace muster::inspect {
namespace {

using Index = std::vector<std::uint64_t>;

/// A part of a tensor that is a product of ranges.
struct Box {
  Index begin;
  Index end;
};

/// Cuts a run of elements, in row-major order, into boxes: at most two for each dimension but the last, and one.
class BoxesOfRun {
 public:
  explicit BoxesOfRun(const Index& extents) : extents_(extents), inner_(extents.size(), 1) {
    for (std::size_t dim = extents.size(); dim-- > 1;) inner_[dim - 1] = inner_[dim] * extents[dim];
  }
  std::vector<Box> operator()(std::uint64_t begin, std::uint64_t end) {
    Index at(extents_.size(), 0);
    cut(0, at, begin, end);
    return std::move(boxes_);
  }

 private:
  // `begin` and `end` count within what is left when the dimensions before `dim` are fixed.
  void cut(std::size_t dim, Index& at, std::uint64_t begin, std::uint64_t end) {
    if (begin == end) return;
    const std::uint64_t inner = inner_[dim];
    const std::uint64_t first = begin / inner;
    const std::uint64_t last = (end - 1) / inner;
    // Where it begins and ends within one row of this dimension, this dimension is fixed.
    if (first == last && (begin % inner != 0 || end % inner != 0)) {
      at[dim] = first;
      cut(dim + 1, at, begin - first * inner, end - first * inner);
      return;
    }
    const std::uint64_t whole_begin = begin % inner == 0 ? first : first + 1;
    const std::uint64_t whole_end = end / inner;
    if (whole_begin != first) {
      at[dim] = first;
      cut(dim + 1, at, begin % inner, inner);
    }
    if (whole_begin < whole_end) {
      Box box{at, at};
      for (std::size_t i = 0; i < dim; ++i) box.end[i] = at[i] + 1;
      box.begin[dim] = whole_begin;
      box.end[dim] = whole_end;
      for (std::size_t i = dim + 1; i < extents_.size(); ++i) {
        box.begin[i] = 0;
        box.end[i] = extents_[i];
      }
      boxes_.push_back(std::move(box));
    }
    if (end % inner != 0) {
      at[dim] = whole_end;
      cut(dim + 1, at, 0, end % inner);
    }
  }

  Index extents_;
  Index inner_;  ///< elements of one step of each dimension
  std::vector<Box> boxes_;
};

Index to_index(const Shape& shape) {
  return {shape.begin(), shape.end()};
}

/// Calls with every index of a box of indices, row-major.
void for_each_index(const Index& begin, const Index& end, const std::function<void(const Index&)>& call) {
  Index at = begin;
  for (;;) {
    call(at);
    std::size_t dim = at.size();
    while (dim > 0) {
      --dim;
      if (++at[dim] < end[dim]) break;
      at[dim] = begin[dim];
      if (dim == 0) return;
    }
  }
}

class RunReader {
 public:
  RunReader(const os::ReadableFile& file, const ForeignTensor& tensor, std::size_t number, ChunkCache& cache)
      : file_(file),
        tensor_(tensor),
        number_(number),
        cache_(cache),
        extents_(to_index(tensor.stored_shape)),
        chunk_(to_index(tensor.chunk_shape)),
        grid_(extents_.size()) {
    for (std::size_t dim = 0; dim < grid_.size(); ++dim) grid_[dim] = (extents_[dim] + chunk_[dim] - 1) / chunk_[dim];
  }

  void read(std::uint64_t first, std::span<std::byte> target) {
    first_ = first;
    target_ = target;
    const std::uint64_t count = target.size() / tensor_.item_bytes;
    for (const Box& box : BoxesOfRun(extents_)(first, first + count)) {
      Index begin(grid_.size());
      Index end(grid_.size());
      for (std::size_t dim = 0; dim < grid_.size(); ++dim) {
        begin[dim] = box.begin[dim] / chunk_[dim];
        end[dim] = (box.end[dim] - 1) / chunk_[dim] + 1;
      }
      for_each_index(begin, end, [&](const Index& at) { copy_of(at, box); });
    }
  }

 private:
  /// What box and chunk have in common.
  void copy_of(const Index& at, const Box& box) {
    const std::size_t rank = grid_.size();
    Index begin(rank);
    Index end(rank);
    std::uint64_t number = 0;
    bool is_partial = false;
    for (std::size_t dim = 0; dim < rank; ++dim) {
      number = number * grid_[dim] + at[dim];
      const std::uint64_t from = at[dim] * chunk_[dim];
      is_partial = is_partial || from + chunk_[dim] > extents_[dim];
      begin[dim] = std::max(box.begin[dim], from);
      end[dim] = std::min(box.end[dim], from + chunk_[dim]);
    }
    const ChunkCache::Bytes bytes = chunk(number, is_partial);
    // Dimensions that are whole in chunk and tensor alike run on into each other.
    std::size_t run_dim = rank - 1;
    while (run_dim > 0 && chunk_[run_dim] == extents_[run_dim] && begin[run_dim] == 0 &&
           end[run_dim] == extents_[run_dim])
      --run_dim;
    std::uint64_t run = end[run_dim] - begin[run_dim];
    for (std::size_t dim = run_dim + 1; dim < rank; ++dim) run *= extents_[dim];
    Index rows_end(end);
    for (std::size_t dim = run_dim; dim < rank; ++dim) rows_end[dim] = begin[dim] + 1;
    const std::size_t item = tensor_.item_bytes;
    for_each_index(begin, rows_end, [&](const Index& row) {
      std::uint64_t in_tensor = 0;
      std::uint64_t in_chunk = 0;
      for (std::size_t dim = 0; dim < rank; ++dim) {
        in_tensor = in_tensor * extents_[dim] + row[dim];
        in_chunk = in_chunk * chunk_[dim] + (row[dim] - at[dim] * chunk_[dim]);
      }
      const std::span<std::byte> to = target_.subspan((in_tensor - first_) * item, run * item);
      if (bytes)
        std::memcpy(to.data(), bytes->data() + in_chunk * item, to.size());
      else
        fill_elements(tensor_, to);
    });
  }

  /// Null where it was never written.
  ChunkCache::Bytes chunk(std::uint64_t number, bool is_partial) {
    const auto found = std::lower_bound(tensor_.chunks.begin(), tensor_.chunks.end(), number,
                                        [](const StoredChunk& chunk, std::uint64_t n) { return chunk.index < n; });
    if (found == tensor_.chunks.end() || found->index != number) return nullptr;
    if (ChunkCache::Bytes kept = cache_.find(number_, number)) return kept;
    std::vector<std::byte> stored(found->bytes);
    file_.read_at(found->offset, stored);
    const bool is_plain = is_partial && tensor_.partial_chunks_unfiltered;
    try {
      auto decoded = std::make_shared<const std::vector<std::byte>>(
          decode_chunk(std::move(stored), is_plain ? std::span<const ChunkFilter>() : tensor_.filters,
                       found->filter_mask, static_cast<std::size_t>(tensor_.chunk_bytes)));
      cache_.put(number_, number, decoded);
      return decoded;
    } catch (const Error& error) {
      throw Error(error.kind(),
                  fmt::format("the tensor {} of {}, its chunk {} at {} of the file: {}", in_quotes(tensor_.name),
                              file_.path(), number, found->offset, error.what()),
                  {.path = file_.path()});
    }
  }

  const os::ReadableFile& file_;
  const ForeignTensor& tensor_;
  std::size_t number_;
  ChunkCache& cache_;
  Index extents_;
  Index chunk_;
  Index grid_;  ///< chunks along each dimension
  std::uint64_t first_ = 0;
  std::span<std::byte> target_;
};

constexpr unsigned chunk_bits = 24;

}  // namespace

ChunkCache::Bytes ChunkCache::find(std::size_t tensor, std::uint64_t chunk) {
  const std::scoped_lock lock(mutex_);
  const auto found = index_.find(tensor << chunk_bits | chunk);
  if (found == index_.end()) {
    ++misses_;
    return nullptr;
  }
  entries_.splice(entries_.begin(), entries_, found->second);
  return found->second->bytes;
}

void ChunkCache::put(std::size_t tensor, std::uint64_t chunk, Bytes bytes) {
  const std::scoped_lock lock(mutex_);
  const std::uint64_t key = tensor << chunk_bits | chunk;
  // Two threads may have decoded the same one.
  if (index_.contains(key)) return;
  bytes_ += bytes->size();
  entries_.push_front({key, std::move(bytes)});
  index_[key] = entries_.begin();
  while (bytes_ > most_bytes_ && entries_.size() > 1) {
    bytes_ -= entries_.back().bytes->size();
    index_.erase(entries_.back().key);
    entries_.pop_back();
  }
}

std::uint64_t ChunkCache::misses() const noexcept {
  const std::scoped_lock lock(mutex_);
  return misses_;
}

void fill_elements(const ForeignTensor& tensor, std::span<std::byte> target) noexcept {
  if (target.empty()) return;
  const bool is_zero =
      std::all_of(tensor.fill.begin(), tensor.fill.end(), [](std::byte b) { return b == std::byte{}; });
  if (is_zero) {
    std::memset(target.data(), 0, target.size());
    return;
  }
  for (std::size_t at = 0; at < target.size(); at += tensor.fill.size())
    std::memcpy(target.data() + at, tensor.fill.data(), std::min(tensor.fill.size(), target.size() - at));
}

void read_chunked(const os::ReadableFile& file, const ForeignTensor& tensor, std::size_t number, std::uint64_t first,
                  std::span<std::byte> target, ChunkCache& cache) {
  if (target.empty()) return;
  if (tensor.chunks.empty()) {
    fill_elements(tensor, target);
    return;
  }
  RunReader(file, tensor, number, cache).read(first, target);
}

}  // namespace muster::inspect
