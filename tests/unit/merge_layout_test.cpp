// SPDX-License-Identifier: Apache-2.0
// Layouts and rows are compared with a model that moves one unit at a time, and with their inverses: joining and
// cutting restores the parts.

#include "src/merge/layout.hpp"

#include <cstring>
#include <random>
#include <vector>

#include "doctest/doctest.h"
#include "tests/support/patterns.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::merge;
using test::has;
using test::words_of;

namespace {

using Bytes = std::vector<std::byte>;

Bytes bytes_of_seed(std::size_t count, std::uint64_t seed) {
  Bytes bytes(count);
  test::fill(bytes.data(), count, seed);
  return bytes;
}

/// The definition of a layout: copies every unit of every row separately.
Bytes apply_units(const Layout& layout, const std::vector<Bytes>& sources) {
  const auto unit = static_cast<std::size_t>(layout.grain.inner) * itemsize(layout.target.dtype);
  const auto row = static_cast<std::size_t>(layout.target_units) * unit;
  Bytes target(static_cast<std::size_t>(layout.grain.rows) * row);
  for (std::size_t r = 0; r < static_cast<std::size_t>(layout.grain.rows); ++r)
    for (const UnitRange& piece : layout.pieces)
      for (std::int64_t i = 0; i < piece.count; ++i) {
        const auto source = static_cast<std::size_t>(piece.source);
        const std::size_t from =
            (r * static_cast<std::size_t>(layout.source_units[source]) + static_cast<std::size_t>(piece.begin + i)) *
            unit;
        const std::size_t to = r * row + static_cast<std::size_t>(piece.at + i) * unit;
        if (unit != 0) std::memcpy(target.data() + to, sources[source].data() + from, unit);
      }
  return target;
}

void copy(const Rectangle& part, std::byte* target, const std::byte* source) {
  for (std::uint64_t row = 0; row < part.rows; ++row)
    std::memcpy(target + part.to + row * part.to_stride, source + part.from + row * part.from_stride, part.bytes);
}

/// Builds the target window by window.
Bytes apply_windows(const Rows& rows, const std::vector<Bytes>& sources, std::uint64_t window) {
  Bytes target(rows.bytes());
  for (std::uint64_t begin = 0; begin < rows.bytes(); begin += window)
    for (const Rectangle& part : rectangles(rows, begin, begin + window))
      copy(part, target.data() + begin, sources[static_cast<std::size_t>(part.source)].data());
  return target;
}

/// Copies each source piece by piece.
Bytes apply_pieces(const Rows& rows, const std::vector<Bytes>& sources, std::uint64_t piece) {
  Bytes target(rows.bytes());
  for (std::size_t source = 0; source < sources.size(); ++source)
    for (std::uint64_t begin = 0; begin < sources[source].size(); begin += piece) {
      const std::uint64_t end = std::min<std::uint64_t>(begin + piece, sources[source].size());
      for (const Rectangle& part : rectangles_of(rows, static_cast<int>(source), begin, end))
        copy(part, target.data(), sources[source].data() + begin);
    }
  return target;
}

}  // namespace

TEST_CASE("random joins: units, windows of the target and pieces of the sources give the same bytes") {
  std::mt19937 random(11);
  const auto below = [&](int end) { return static_cast<std::int64_t>(random() % static_cast<unsigned>(end)); };
  for (int round = 0; round < 400; ++round) {
    CAPTURE(round);
    const DType dtype = std::vector{DType::u8, DType::bf16, DType::f32, DType::i64}[static_cast<std::size_t>(below(4))];
    Shape shape(static_cast<std::size_t>(1 + below(3)));
    for (std::int64_t& extent : shape) extent = below(7);
    const auto dim = static_cast<std::size_t>(below(static_cast<int>(shape.size())));
    const std::vector<std::int64_t> blocks =
        std::vector<std::vector<std::int64_t>>{{}, {1, 1}, {2, 1, 1}}[static_cast<std::size_t>(below(3))];
    const std::int64_t multiple = blocks.empty() ? 1 : blocks.size() == 2 ? 2 : 4;
    std::vector<TensorSpec> specs;
    std::vector<Bytes> sources;
    for (std::int64_t i = 1 + below(5); i > 0; --i) {
      TensorSpec spec{dtype, shape};
      spec.shape[dim] = below(5) * multiple;
      sources.push_back(bytes_of_seed(byte_size(dtype, spec.shape), static_cast<std::uint64_t>(round * 10 + i)));
      specs.push_back(std::move(spec));
    }
    const bool is_stack = below(4) == 0;
    if (is_stack)
      for (std::size_t i = 0; i < specs.size(); ++i) {
        specs[i] = specs[0];
        sources[i].resize(sources[0].size());
      }
    const Layout layout =
        join(is_stack ? merge::stack() : Merge(merge::Concat{static_cast<std::int64_t>(dim), blocks}), specs);
    const Rows rows = rows_of(layout);
    CHECK(rows.bytes() == byte_size(layout.target.dtype, layout.target.shape));
    const Bytes expected = apply_units(layout, sources);
    for (const std::uint64_t piece : {1U, 5U, 64U, 100000U}) {
      CHECK(apply_windows(rows, sources, piece) == expected);
      CHECK(apply_pieces(rows, sources, piece) == expected);
    }
  }
}

TEST_CASE("cutting is inverted by joining, padding is trimmed, and both compose in one step") {
  for (const Merge& merge :
       {merge::concat(0), merge::concat(1), merge::concat(-1), merge::concat_blocks(1, {2, 1}), merge::stack()}) {
    for (const int parts : {1, 2, 3, 5}) {
      // Blocks that do not divide evenly are padded separately, and then have another proportion.
      if (merge == merge::concat_blocks(1, {2, 1}) && 12 / 3 % parts != 0) continue;
      const TensorSpec whole{DType::bf16,
                             std::holds_alternative<merge::Stack>(merge) ? Shape{parts, 6, 4} : Shape{7, 12, 3}};
      const Bytes bytes = bytes_of_seed(byte_size(whole.dtype, whole.shape), 5);
      const Cut cut_up = cut(merge, whole, parts);
      std::vector<Bytes> shards;
      for (int part = 0; part < parts; ++part) shards.push_back(apply_units(part_of(cut_up, part), {bytes}));
      const std::vector<TensorSpec> specs(static_cast<std::size_t>(parts), cut_up.part);
      std::optional<std::int64_t> true_size;
      if (cut_up.padded_dim) true_size = whole.shape[*cut_up.padded_dim];
      const Layout joined = join(merge, specs, true_size);
      CHECK(joined.target == whole);
      CHECK(apply_units(joined, shards) == bytes);
      // From these parts directly to a different number of parts.
      if (std::holds_alternative<merge::Stack>(merge)) continue;
      const Cut other = cut(merge, whole, 4);
      for (int part = 0; part < 4; ++part)
        CHECK(apply_units(compose(joined, other, part), shards) == apply_units(part_of(other, part), {bytes}));
    }
  }
}

TEST_CASE("packed elements are joined if pieces are whole bytes") {
  const TensorSpec spec{DType::f4_e2m1, {3, 4}};
  const std::vector<TensorSpec> specs(2, spec);
  CHECK(rows_of(join(merge::concat(1), specs)).row_bytes == 4);
  CHECK(rows_of(join(merge::stack(), specs)).bytes() == 12);
  const std::vector<TensorSpec> odd(2, {DType::u4, {3, 5}});
  CHECK(has(words_of(ErrorKind::unsupported, [&] { (void)rows_of(join(merge::concat(1), odd)); }), "share a byte"));
  CHECK(has(words_of(ErrorKind::unsupported, [&] { (void)rows_of(join(merge::stack(), odd)); }), "share a byte"));
  // Four elements of six bits are three bytes.
  const auto six_bits = [](Shape shape) { return std::vector<TensorSpec>(2, {DType::f6_e2m3, std::move(shape)}); };
  CHECK(rows_of(join(merge::concat(1), six_bits({3, 4}))).row_bytes == 6);
  CHECK(rows_of(join(merge::concat(0), six_bits({2, 2}))).bytes() == 6);
  for (const std::int64_t columns : {1, 2, 3, 6})
    CHECK(has(words_of(ErrorKind::unsupported,
                       [&] {
                         (void)rows_of(join(merge::concat(1), six_bits({3, columns})));
                       }),
              "share a byte"));
  for (const Shape& nothing : {Shape{3, 0, 2}, Shape{0, 1}, Shape{0}})
    CHECK(rows_of(join(merge::concat(-1), six_bits(nothing))).bytes() == 0);
  // A cut is at a byte: of twelve columns one part gets eight.
  const Cut twelve = cut(merge::concat(1), {DType::f6_e3m2, {3, 12}}, 2);
  CHECK(twelve.part.shape == Shape{3, 8});
  for (int part = 0; part < 2; ++part) CHECK(rows_of(part_of(twelve, part)).row_bytes == 6);
}

TEST_CASE("mismatches are named") {
  const std::vector<TensorSpec> taller = {{DType::f32, {4, 8}}, {DType::f32, {5, 8}}};
  const std::vector<int> ranks = {3, 7};
  CHECK(join(merge::concat(0), taller).target.shape == Shape{9, 8});
  const std::string words =
      words_of(ErrorKind::rank_mismatch, [&] { (void)join(merge::concat(1), taller, {}, ranks); });
  CHECK(has(words, "rank 3 has F32 [4, 8]"));
  CHECK(has(words, "rank 7 has F32 [5, 8]"));
  CHECK(has(words_of(ErrorKind::rank_mismatch, [&] { (void)join(merge::max(), taller); }),
            "\"max\" requires equal dtypes"));
  CHECK(has(words_of(ErrorKind::rank_mismatch, [&] { (void)join(merge::stack(), taller); }), "\"stack\""));
  for (const Shape& shape : {Shape{3, 8}, Shape{}})
    CHECK(has(words_of(ErrorKind::invalid_argument,
                       [&] {
                         (void)cut(merge::stack(), {DType::f32, shape}, 2);
                       }),
              "2 ranks need a shape with that size in dimension 0"));
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { (void)join(merge::concat(2), taller); }),
            "dimension 2 is out of range"));
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { (void)join(merge::concat(-3), taller); }),
            "dimension -3 is out of range"));
  CHECK(has(words_of(ErrorKind::invalid_argument,
                     [&] {
                       (void)join(merge::concat_blocks(0, {2, 1}), taller);
                     }),
            "blocks [2, 1]"));
  CHECK(has(words_of(ErrorKind::invalid_argument,
                     [&] {
                       (void)join(merge::concat_blocks(0, {1, 0}), taller);
                     }),
            "at least 1"));
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { (void)join(merge::concat(0), taller, 10); }), "true size"));
  CHECK(has(words_of(ErrorKind::invalid_argument, [] { (void)join(merge::concat(0), {}); }), "must not be empty"));
  for (const Merge& merge : {merge::first(), merge::max(), merge::sum()})
    CHECK(has(words_of(ErrorKind::invalid_argument, [&] { (void)cut(merge, taller[0], 2); }), "is not invertible"));
}
