// SPDX-License-Identifier: Apache-2.0
#include "src/merge/layout.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <string>
#include <utility>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/merge/reduce.hpp"

namespace muster {

std::string_view merge_name(const Merge& merge) noexcept {
  constexpr std::array<std::string_view, std::variant_size_v<Merge>> names = {"concat", "same", "first",
                                                                              "max",    "sum",  "stack"};
  return names[merge.index()];
}

namespace merge {
namespace {

[[noreturn]] void refuse(const std::string& words) {
  throw Error(ErrorKind::invalid_argument, words);
}

std::int64_t product(const Shape& shape, std::size_t begin, std::size_t end) {
  return std::accumulate(shape.begin() + static_cast<std::ptrdiff_t>(begin),
                         shape.begin() + static_cast<std::ptrdiff_t>(end), std::int64_t{1}, std::multiplies<>());
}

Grain whole_grain(const Shape& shape) {
  return {1, element_count(shape)};
}

std::size_t dimension(const Concat& merge, const Shape& shape) {
  const auto dimensions = static_cast<std::int64_t>(shape.size());
  const std::int64_t dim = merge.dim < 0 ? merge.dim + dimensions : merge.dim;
  if (dim < 0 || dim >= dimensions)
    refuse(fmt::format("concat: dimension {} is out of range for shape {}", merge.dim, to_string(shape)));
  return static_cast<std::size_t>(dim);
}

Grain grain_along(const Shape& shape, std::size_t dim) {
  return {product(shape, 0, dim), product(shape, dim + 1, shape.size())};
}

/// Returns the relative sizes of the blocks, divided by their greatest common divisor. The sizes of the ranks must be
/// multiples of their sum, which should be as small as possible.
std::vector<std::int64_t> weights_of(const Concat& merge) {
  if (merge.blocks.empty()) return {1};
  std::int64_t total = 0;
  std::int64_t divisor = 0;
  for (const std::int64_t weight : merge.blocks) {
    if (weight < 1 || __builtin_add_overflow(total, weight, &total))
      refuse(fmt::format("blocks [{}]: each must be at least 1", fmt::join(merge.blocks, ", ")));
    divisor = std::gcd(divisor, weight);
  }
  std::vector<std::int64_t> weights = merge.blocks;
  for (std::int64_t& weight : weights) weight /= divisor;
  return weights;
}

/// Divides a size by the sum of the weights.
std::int64_t units_of(const std::vector<std::int64_t>& weights, std::int64_t size, std::size_t dim) {
  const std::int64_t total = std::accumulate(weights.begin(), weights.end(), std::int64_t{0});
  if (size % total != 0)
    refuse(fmt::format("blocks [{}]: size {} along dimension {} is not a multiple of their {} units",
                       fmt::join(weights, ", "), size, dim, total));
  return size / total;
}

/// Divides a size into the blocks of a fused tensor.
std::vector<std::int64_t> block_sizes(const Concat& merge, std::int64_t size, std::size_t dim) {
  std::vector<std::int64_t> sizes = weights_of(merge);
  const std::int64_t units = units_of(sizes, size, dim);
  for (std::int64_t& block : sizes) block *= units;
  return sizes;
}

/// Returns the relative size of a head in each block: the size of the block divided by its heads.
std::vector<std::int64_t> head_sizes(const Concat& merge, std::span<const std::int64_t> heads) {
  std::vector<std::int64_t> sizes(heads.size(), 1);
  if (merge.blocks.empty() || heads.empty()) return sizes;
  if (merge.blocks.size() != heads.size())
    refuse(fmt::format("blocks: expected {} counts of heads, received {}", merge.blocks.size(), heads.size()));
  for (std::size_t block = 0; block < heads.size(); ++block) {
    sizes[block] = merge.blocks[block] / heads[block];
    if (merge.blocks[block] % heads[block] != 0)
      refuse(fmt::format("blocks [{}] are not multiples of the [{}] heads", fmt::join(merge.blocks, ", "),
                         fmt::join(heads, ", ")));
  }
  return sizes;
}

/// Divides a size into blocks of `counts` heads each. `sizes` are the relative sizes of the heads.
std::vector<std::int64_t> head_blocks(std::span<const std::int64_t> counts, std::span<const std::int64_t> sizes,
                                      std::int64_t size, std::size_t dim) {
  std::vector<std::int64_t> blocks(counts.size());
  std::int64_t total = 0;
  for (std::size_t block = 0; block < counts.size(); ++block)
    if (__builtin_mul_overflow(counts[block], sizes[block], &blocks[block]) ||
        __builtin_add_overflow(total, blocks[block], &total))
      refuse(fmt::format("heads: their sum along dimension {} exceeds 63 bits", dim));
  if (total == 0 || size % total != 0)
    refuse(fmt::format("heads: size {} along dimension {} is not a multiple of {} heads", size, dim, total));
  for (std::int64_t& block : blocks) block *= size / total;
  return blocks;
}

class Joining {
 public:
  Joining(std::span<const TensorSpec> sources, std::optional<std::int64_t> true_size, std::span<const int> ranks,
          std::span<const std::int64_t> heads)
      : sources_(sources), true_size_(true_size), ranks_(ranks), heads_(heads) {}

  Layout operator()(const Concat& merge) {
    const TensorSpec& first = sources_.front();
    const std::size_t dim = dimension(merge, first.shape);
    std::int64_t total = 0;
    for (std::size_t i = 0; i < sources_.size(); ++i) {
      check_concat(i, dim);
      if (__builtin_add_overflow(total, sources_[i].shape[dim], &total))
        refuse(fmt::format("concat: the sum of the ranks' sizes along dimension {} exceeds 63 bits", dim));
    }
    const auto parts = static_cast<int>(sources_.size());
    std::vector<HeadShare> shares;
    std::vector<std::int64_t> held;  // heads per rank in each block
    for (const std::int64_t heads : heads_) held.push_back(shares.emplace_back(share_heads(heads, parts)).heads);
    const std::vector<std::int64_t> of_head = head_sizes(merge, heads_);
    const auto blocks_of = [&](std::int64_t size) {
      return heads_.empty() ? block_sizes(merge, size, dim) : head_blocks(held, of_head, size, dim);
    };
    if (!heads_.empty()) {
      check_equal("heads");
      const std::vector<std::int64_t> blocks = blocks_of(first.shape[dim]);
      std::int64_t size = 0;
      for (std::size_t block = 0; block < blocks.size(); ++block) {
        std::int64_t whole = 0;
        if (__builtin_mul_overflow(blocks[block] / held[block], heads_[block], &whole) ||
            __builtin_add_overflow(size, whole, &size))
          refuse(fmt::format("heads: their sum along dimension {} exceeds 63 bits", dim));
      }
      true_size_ = size;
    }
    const std::int64_t size = true_size_.value_or(total);
    if (size < 0 || size > total)
      refuse(fmt::format("concat: the true size along dimension {} is {}, but the ranks have only {} in total", dim,
                         size, total));
    Layout layout{first, grain_along(first.shape, dim), size, {}, Combine::copy, {}, {}};
    layout.target.shape[dim] = size;
    element_count(layout.target.shape);
    std::vector<std::vector<std::int64_t>> blocks;
    for (const TensorSpec& source : sources_) {
      layout.source_units.push_back(source.shape[dim]);
      blocks.push_back(blocks_of(source.shape[dim]));
    }
    std::vector<std::int64_t> begins(sources_.size(), 0);
    std::int64_t at = 0;
    const std::vector<std::int64_t> wanted =
        heads_.empty() ? block_sizes(merge, size, dim) : head_blocks(heads_, of_head, size, dim);
    for (std::size_t block = 0; block < wanted.size(); ++block) {
      std::int64_t left = wanted[block];
      for (std::size_t i = 0; i < sources_.size(); ++i) {
        const int nth = heads_.empty() ? 0 : static_cast<int>(i) % static_cast<int>(shares[block].ranks);
        if (nth != 0) {
          const auto other = static_cast<int>(i);
          layout.copies.push_back({other - nth, other, begins[i], blocks[i][block]});
          begins[i] += blocks[i][block];
          continue;
        }
        const std::int64_t count = std::min(left, blocks[i][block]);
        if (count > 0) layout.pieces.push_back({static_cast<int>(i), begins[i], count, at});
        begins[i] += blocks[i][block];
        at += count;
        left -= count;
      }
      // Padding is at the end of each block. If one rank has more than its share, the ranks can have too little for a
      // block.
      if (left != 0)
        refuse(fmt::format("concat: the ranks have too few elements of block {} of {}", block + 1, wanted.size()));
    }
    return layout;
  }

  Layout operator()(const Same&) const {
    check_equal("same");
    Layout layout = whole_of_first();
    for (std::size_t i = 1; i < sources_.size(); ++i) layout.must_equal.push_back(static_cast<int>(i));
    return layout;
  }

  Layout operator()(const First&) const { return whole_of_first(); }
  Layout operator()(const Max&) const { return reduced(Combine::max, "max"); }
  Layout operator()(const Sum&) const { return reduced(Combine::sum, "sum"); }

  Layout operator()(const Stack&) const {
    check_equal("stack");
    const TensorSpec& first = sources_.front();
    const auto count = static_cast<std::int64_t>(sources_.size());
    Layout layout{first, whole_grain(first.shape), count, {}, Combine::copy, {}, {}};
    layout.target.shape.insert(layout.target.shape.begin(), count);
    element_count(layout.target.shape);
    layout.source_units.assign(sources_.size(), 1);
    for (int i = 0; i < count; ++i) layout.pieces.push_back({i, 0, 1, i});
    return layout;
  }

 private:
  [[nodiscard]] Layout whole_of_first() const {
    const TensorSpec& first = sources_.front();
    Layout layout{first, whole_grain(first.shape), 1, {}, Combine::copy, {{0, 0, 1, 0}}, {}};
    layout.source_units.assign(sources_.size(), 1);
    return layout;
  }

  [[nodiscard]] Layout reduced(Combine combine, std::string_view name) const {
    check_equal(name);
    check_reducible(combine, sources_.front().dtype);
    Layout layout = whole_of_first();
    layout.combine = combine;
    layout.pieces.clear();
    for (std::size_t i = 0; i < sources_.size(); ++i) layout.pieces.push_back({static_cast<int>(i), 0, 1, 0});
    return layout;
  }

  [[nodiscard]] int rank(std::size_t source) const {
    return ranks_.empty() ? static_cast<int>(source) : ranks_[source];
  }

  [[noreturn]] void refuse_shapes(std::size_t source, std::string_view wanted) const {
    throw Error(ErrorKind::rank_mismatch,
                fmt::format("merge: rank {} has {}, rank {} has {}; {}", rank(0), to_string(sources_.front()),
                            rank(source), to_string(sources_[source]), wanted),
                {.rank = rank(source)});
  }

  void check_equal(std::string_view name) const {
    for (std::size_t i = 1; i < sources_.size(); ++i)
      if (sources_[i] != sources_.front())
        refuse_shapes(i, fmt::format("{} requires equal dtypes and shapes", in_quotes(name)));
  }

  void check_concat(std::size_t i, std::size_t dim) const {
    const TensorSpec& first = sources_.front();
    const TensorSpec& other = sources_[i];
    bool fits = other.dtype == first.dtype && other.shape.size() == first.shape.size();
    for (std::size_t d = 0; fits && d < first.shape.size(); ++d) fits = d == dim || other.shape[d] == first.shape[d];
    if (!fits) refuse_shapes(i, fmt::format("\"concat\" allows them to differ in dimension {} only", dim));
  }

  std::span<const TensorSpec> sources_;
  std::optional<std::int64_t> true_size_;
  std::span<const int> ranks_;
  std::span<const std::int64_t> heads_;
};

class CutPlanner {
 public:
  CutPlanner(const TensorSpec& whole, int parts, std::span<const std::int64_t> heads)
      : whole_(whole), parts_(parts), heads_(heads) {}

  Cut operator()(const Concat& merge) const {
    const std::size_t dim = dimension(merge, whole_.shape);
    Cut cut{whole_, grain_along(whole_.shape, dim), whole_.shape[dim], 0, {}, {}};
    cut.pieces.resize(static_cast<std::size_t>(parts_));
    std::int64_t block_begin = 0;
    const std::vector<std::int64_t> weights = weights_of(merge);
    const std::int64_t units = units_of(weights, whole_.shape[dim], dim);
    // Each part gets the same share of every block, so that its blocks have the same proportions as in the whole.
    std::int64_t share = units / parts_ + (units % parts_ == 0 ? 0 : 1);
    // Packed elements share bytes, so a slice must not end inside a byte.
    const std::int64_t group = elements_in_group(whole_.dtype);
    const std::int64_t units_in_group = group / std::gcd(group, cut.grain.inner);
    share = (share + units_in_group - 1) / units_in_group * units_in_group;
    const std::vector<std::int64_t> sizes =
        heads_.empty() ? block_sizes(merge, whole_.shape[dim], dim)
                       : head_blocks(heads_, head_sizes(merge, heads_), whole_.shape[dim], dim);
    for (std::size_t block = 0; block < sizes.size(); ++block) {
      const std::int64_t size = sizes[block];
      const HeadShare shared = heads_.empty() ? HeadShare{} : share_heads(heads_[block], parts_);
      const std::int64_t slice = heads_.empty() ? share * weights[block] : size / heads_[block] * shared.heads;
      if (slice * parts_ != size * shared.ranks) cut.padded_dim = dim;
      for (int part = 0; part < parts_; ++part) {
        const std::int64_t begin = std::min(size, slice * (part / shared.ranks));
        const std::int64_t count = std::min(slice, size - begin);
        if (count > 0)
          cut.pieces[static_cast<std::size_t>(part)].push_back({0, block_begin + begin, count, cut.part_units});
      }
      block_begin += size;
      cut.part_units += slice;
    }
    cut.part.shape[dim] = cut.part_units;
    return cut;
  }

  Cut operator()(const Same&) const {
    Cut cut{whole_, whole_grain(whole_.shape), 1, 1, {}, {}};
    cut.pieces.assign(static_cast<std::size_t>(parts_), {{0, 0, 1, 0}});
    return cut;
  }

  Cut operator()(const Stack&) const {
    if (whole_.shape.empty() || whole_.shape.front() != parts_)
      refuse(fmt::format("\"stack\": {} ranks need a shape with that size in dimension 0, but the shape is {}", parts_,
                         to_string(whole_.shape)));
    Cut cut{whole_, {}, parts_, 1, {}, {}};
    cut.part.shape.erase(cut.part.shape.begin());
    cut.grain = whole_grain(cut.part.shape);
    for (int part = 0; part < parts_; ++part) cut.pieces.push_back({{0, part, 1, 0}});
    return cut;
  }

  /// First, max and sum.
  Cut operator()(const auto& merge) const {
    refuse(fmt::format("{} is not invertible, so the tensor cannot be cut for ranks. Use \"same\"",
                       in_quotes(merge_name(merge))));
  }

 private:
  const TensorSpec& whole_;
  int parts_;
  std::span<const std::int64_t> heads_;
};

}  // namespace

HeadShare share_heads(std::int64_t heads, int parts) {
  if (parts > heads && parts % heads == 0) return {1, parts / heads};
  return {(heads + parts - 1) / parts, 1};
}

Layout join(const Merge& merge, std::span<const TensorSpec> sources, std::optional<std::int64_t> true_size,
            std::span<const int> ranks, std::span<const std::int64_t> heads) {
  if (sources.empty()) refuse("merge: the list of tensors must not be empty");
  return std::visit(Joining(sources, true_size, ranks, heads), merge);
}

Cut cut(const Merge& merge, const TensorSpec& whole, int parts, std::span<const std::int64_t> heads) {
  if (parts < 1) refuse("merge: a tensor must be cut for at least one rank");
  return std::visit(CutPlanner(whole, parts, heads), merge);
}

Layout part_of(const Cut& cut, int part) {
  return {
      cut.part, cut.grain, cut.part_units, {cut.whole_units}, Combine::copy, cut.pieces[static_cast<std::size_t>(part)],
      {}};
}

Layout compose(const Layout& whole, const Cut& cut, int part) {
  const std::vector<UnitRange>& wanted_pieces = cut.pieces[static_cast<std::size_t>(part)];
  // If every part is the whole tensor, the dimension of the join does not matter. Reductions can be composed only in
  // this case.
  if (cut.part == whole.target && wanted_pieces == std::vector<UnitRange>{{0, 0, cut.whole_units, 0}}) return whole;
  if (whole.grain != cut.grain || whole.target_units != cut.whole_units || whole.combine != Combine::copy)
    refuse("merge: a tensor cannot be joined along one dimension and cut along another in one step");
  Layout layout{cut.part, cut.grain, cut.part_units, whole.source_units, whole.combine, {}, whole.must_equal};
  for (const UnitRange& wanted : wanted_pieces) {
    for (const UnitRange& piece : whole.pieces) {
      const std::int64_t begin = std::max(wanted.begin, piece.at);
      const std::int64_t end = std::min(wanted.begin + wanted.count, piece.at + piece.count);
      if (begin >= end) continue;
      layout.pieces.push_back(
          {piece.source, piece.begin + (begin - piece.at), end - begin, wanted.at + (begin - wanted.begin)});
    }
  }
  return layout;
}

namespace {

/// Computes the offset of a unit in a row of a tensor, in bytes.
class Ruler {
 public:
  Ruler(const Layout& layout, std::int64_t units)
      : unit_bits_(static_cast<std::uint64_t>(bits(layout.target.dtype)) *
                   static_cast<std::uint64_t>(layout.grain.inner)),
        units_(units),
        rows_(layout.grain.rows) {}

  [[nodiscard]] std::uint64_t offset(std::int64_t unit) const {
    const std::uint64_t at = static_cast<std::uint64_t>(unit) * unit_bits_;
    // Only the end of a packed tensor may be inside a byte. Without rows there are no elements.
    if (at % 8 != 0 && rows_ != 0 && !(unit == units_ && rows_ == 1))
      throw Error(ErrorKind::unsupported, "merge: packed elements of different slices would share a byte");
    return (at + 7) / 8;
  }
  [[nodiscard]] std::uint64_t bytes() const { return offset(units_); }

 private:
  std::uint64_t unit_bits_;
  std::int64_t units_;
  std::int64_t rows_;
};

bool continues(const Run& a, const Run& b) {
  return a.source == b.source && a.stride == b.stride && a.begin + a.bytes == b.begin && a.at + a.bytes == b.at;
}

}  // namespace

Rows rows_of(const Layout& layout) {
  const Ruler target(layout, layout.target_units);
  Rows rows{static_cast<std::uint64_t>(layout.grain.rows), target.bytes(), {}, false};
  std::uint64_t covered = 0;
  for (const UnitRange& piece : layout.pieces) {
    const Ruler source(layout, layout.source_units[static_cast<std::size_t>(piece.source)]);
    const std::uint64_t at = target.offset(piece.at);
    const std::uint64_t begin = source.offset(piece.begin);
    const Run run{piece.source, begin, source.bytes(), target.offset(piece.at + piece.count) - at, at};
    if (run.bytes == 0) continue;
    covered += run.bytes;
    if (!rows.runs.empty() && layout.combine == Combine::copy && continues(rows.runs.back(), run))
      rows.runs.back().bytes += run.bytes;
    else
      rows.runs.push_back(run);
  }
  rows.has_gaps = layout.combine == Combine::copy && covered < rows.row_bytes;
  // If every row is one run without gaps on either side, all rows are joined into one.
  const bool is_dense = std::ranges::all_of(
      rows.runs, [&](const Run& run) { return run.bytes == rows.row_bytes && run.stride == rows.row_bytes; });
  if (is_dense && !rows.has_gaps) {
    rows.row_bytes *= rows.count;
    for (Run& run : rows.runs) run.bytes = run.stride = rows.row_bytes;
    rows.count = rows.row_bytes == 0 ? 0 : 1;
  }
  if (rows.row_bytes == 0) rows.count = 0;
  return rows;
}

std::vector<Band> bands_of(const Layout& layout) {
  if (!layout.bands.empty()) return layout.bands;
  return {{0, rows_of(layout)}};
}

std::vector<Rectangle> rectangles_of(const Rows& rows, int source, std::uint64_t begin, std::uint64_t end) {
  std::vector<Rectangle> all;
  for (const Run& run : rows.runs) {
    if (run.source != source) continue;
    // Adds the bytes [from, to) of the run in `count` rows from `row` on.
    const auto add = [&](std::uint64_t row, std::uint64_t count, std::uint64_t from, std::uint64_t to) {
      if (count != 0 && from < to)
        all.push_back({source, run.begin + row * run.stride + from - begin, run.stride,
                       row * rows.row_bytes + run.at + from, rows.row_bytes, to - from, count});
    };
    // Returns the first row that ends after `at`, and how many of its bytes are before `at`.
    const auto position = [&](std::uint64_t at) {
      const std::uint64_t past = at > run.begin ? at - run.begin : 0;
      const std::uint64_t row = std::min(past / run.stride, rows.count);
      const std::uint64_t into = row == rows.count ? 0 : std::min(past - row * run.stride, run.bytes);
      return into == run.bytes ? std::pair(row + 1, std::uint64_t{0}) : std::pair(row, into);
    };
    const auto [first, into_first] = position(begin);
    const auto [last, into_last] = position(end);
    if (first == last) {
      add(first, first == rows.count ? 0 : 1, into_first, into_last);
      continue;
    }
    if (into_first != 0) add(first, 1, into_first, run.bytes);
    const std::uint64_t whole = into_first == 0 ? first : first + 1;
    add(whole, last - whole, 0, run.bytes);
    if (into_last != 0) add(last, 1, 0, into_last);
  }
  return all;
}

std::vector<Rectangle> rectangles(const Rows& rows, std::uint64_t begin, std::uint64_t end) {
  std::vector<Rectangle> all;
  // Adds the bytes [from, to) of each of `count` rows from `row` on.
  const auto add = [&](std::uint64_t row, std::uint64_t count, std::uint64_t from, std::uint64_t to) {
    if (count == 0 || from >= to) return;
    for (const Run& run : rows.runs) {
      const std::uint64_t first = std::max(from, run.at);
      const std::uint64_t last = std::min(to, run.at + run.bytes);
      if (first >= last) continue;
      all.push_back({run.source, run.begin + row * run.stride + (first - run.at), run.stride,
                     row * rows.row_bytes + first - begin, rows.row_bytes, last - first, count});
    }
  };
  end = std::min(end, rows.bytes());
  if (begin >= end) return all;
  const std::uint64_t first = begin / rows.row_bytes;
  const std::uint64_t last = end / rows.row_bytes;  // the first row that is not complete
  const std::uint64_t into_first = begin % rows.row_bytes;
  const std::uint64_t into_last = end % rows.row_bytes;
  if (first == last) {
    add(first, 1, into_first, into_last);
    return all;
  }
  const std::uint64_t whole = into_first == 0 ? first : first + 1;
  if (into_first != 0) add(first, 1, into_first, rows.row_bytes);
  add(whole, last - whole, 0, rows.row_bytes);
  add(last, into_last == 0 ? 0 : 1, 0, into_last);
  return all;
}

}  // namespace merge
}  // namespace muster
