// SPDX-License-Identifier: Apache-2.0
// Fingerprints: CRC-64/XZ, its linear part, CRCs of boxes, the text form, differences, and fingerprints of paths.

#include "muster/fingerprint.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "muster/export.hpp"
#include "src/core/crc64.hpp"
#include "src/merge/box_remainder.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using test::has;
using test::words_of;

namespace {

using Random = std::mt19937_64;

std::int64_t below(Random& random, std::int64_t end) {
  return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(end));
}

std::span<const std::byte> text_bytes(std::string_view text) {
  return std::as_bytes(std::span(text));
}

/// A box of a tensor as a copy of its own, in which the dimensions have a random order in memory and gaps.
merge::PlacedBox strided_copy(Random& random, const Tensor& whole, const Shape& begin, const Shape& extents,
                              std::vector<Tensor>& owners) {
  TensorView part = whole;
  for (std::size_t dim = 0; dim < begin.size(); ++dim) part = part.slice(dim, begin[dim], begin[dim] + extents[dim]);
  std::vector<std::size_t> order(begin.size());
  for (std::size_t dim = 0; dim < order.size(); ++dim) order[dim] = dim;
  if (random() % 2 == 0) std::ranges::shuffle(order, random);
  Strides strides(begin.size());
  std::int64_t step = random() % 4 == 0 ? 2 : 1;
  for (std::size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = step;
    step *= extents[order[i]] + below(random, 2);
  }
  const auto item = static_cast<std::int64_t>(itemsize(whole.dtype()));
  Tensor memory = Tensor::allocate(DType::u8, {std::max<std::int64_t>(step, 1) * item});
  TensorView view(whole.dtype(), extents, memory.data(), strides);
  const Tensor dense = Tensor::copy_of(part);
  Shape index(extents.size(), 0);
  for (std::int64_t i = 0; i < view.element_count(); ++i) {
    std::int64_t rest = i;
    std::int64_t place = 0;
    for (std::size_t dim = extents.size(); dim-- > 0; rest /= extents[dim]) place += rest % extents[dim] * strides[dim];
    std::memcpy(memory.mutable_data() + place * item, dense.data() + i * item, static_cast<std::size_t>(item));
  }
  owners.push_back(std::move(memory));
  return {view, whole.shape(), begin};
}

/// Cuts a box at random, until some pieces are left.
void cut_at_random(Random& random, Shape begin, Shape extents, int depth, std::vector<std::pair<Shape, Shape>>& boxes) {
  if (depth == 0 || begin.empty()) return boxes.emplace_back(std::move(begin), std::move(extents)), void();
  const auto dim = static_cast<std::size_t>(below(random, static_cast<std::int64_t>(begin.size())));
  const std::int64_t at = below(random, extents[dim] + 1);
  Shape second = begin;
  Shape rest = extents;
  second[dim] += at;
  rest[dim] -= at;
  extents[dim] = at;
  cut_at_random(random, std::move(begin), std::move(extents), depth - 1, boxes);
  cut_at_random(random, std::move(second), std::move(rest), depth - 1, boxes);
}

std::uint64_t crc_of_boxes(std::span<const merge::PlacedBox> boxes, std::size_t most, std::uint64_t bytes) {
  std::vector<merge::PlacedBox> pieces;
  for (const merge::PlacedBox& box : boxes) merge::cut_box(merge::in_bytes(box, "w"), most, pieces);
  std::uint64_t remainder = 0;
  std::vector<std::byte> memory;
  for (const merge::PlacedBox& piece : pieces) remainder ^= merge::box_remainder(piece, memory);
  return crc64_of_remainder(remainder, bytes);
}

Fingerprint sample() {
  return {{{"a", {DType::bf16, {4, 8}}, 0x995dc9bbdf1939fa},
           {"b\n\\\xff\xe2\x80\xae", {DType::f32, {}}, 1},
           {"c  d", {DType::u4, {0}}, 0}}};
}

}  // namespace

TEST_CASE("CRC-64/XZ has its check value, and can be joined") {
  const auto text = text_bytes("123456789");
  CHECK(crc64(text) == 0x995dc9bbdf1939fa);
  CHECK(crc64({}) == 0);
  CHECK(crc64_of_remainder(crc64_remainder(text), text.size()) == crc64(text));
  Random random(1);
  std::vector<std::byte> bytes(5000);
  test::fill(bytes.data(), bytes.size(), 3);
  for (int i = 0; i < 200; ++i) {
    const auto all = std::span(bytes).first(static_cast<std::size_t>(below(random, 5001)));
    const auto a = all.first(static_cast<std::size_t>(below(random, static_cast<std::int64_t>(all.size()) + 1)));
    const auto b = all.subspan(a.size());
    CHECK(crc64_joined(crc64(a), crc64(b), b.size()) == crc64(all));
    const std::uint64_t shifted = crc64_shifted(crc64_remainder(a), b.size());
    CHECK(Crc64Shift(b.size())(crc64_remainder(a)) == shifted);
    CHECK(crc64_of_remainder(shifted ^ crc64_remainder(b), all.size()) == crc64(all));
  }
  // Shifts are added, also beyond 32 bits.
  const std::uint64_t far = std::uint64_t{1} << 40;
  CHECK(crc64_shifted(crc64_shifted(7, far), far + 3) == crc64_shifted(7, 2 * far + 3));
}

TEST_CASE("random boxes of random strides give the CRC of the whole tensor") {
  Random random(2);
  for (int round = 0; round < 600; ++round) {
    CAPTURE(round);
    const DType dtype = std::array{DType::u8, DType::bf16, DType::f32, DType::complex64}[random() % 4];
    Shape shape(random() % 5);
    for (std::int64_t& extent : shape) extent = below(random, 9);
    const Tensor whole = test::pattern(dtype, shape, random());
    std::vector<std::pair<Shape, Shape>> cuts;
    cut_at_random(random, Shape(shape.size(), 0), shape, static_cast<int>(random() % 4), cuts);
    std::vector<Tensor> owners;
    std::vector<merge::PlacedBox> boxes;
    for (const auto& [begin, extents] : cuts) boxes.push_back(strided_copy(random, whole, begin, extents, owners));
    std::ranges::shuffle(boxes, random);
    const std::size_t most = std::array<std::size_t, 3>{1, 64, 1 << 20}[random() % 3];
    CHECK(crc_of_boxes(boxes, most, whole.nbytes()) == crc64(whole.bytes()));
  }
}

TEST_CASE("boxes of packed elements end at whole bytes") {
  const Tensor whole = test::pattern(DType::f6_e2m3, {3, 8}, 1);
  const auto row_bytes = static_cast<std::ptrdiff_t>(whole.nbytes() / 3);
  std::vector<std::byte> left;
  std::vector<std::byte> right;
  for (std::ptrdiff_t row = 0; row < 3; ++row)
    for (std::ptrdiff_t i = 0; i < row_bytes; ++i)
      (i < row_bytes / 2 ? left : right).push_back(whole.data()[row * row_bytes + i]);
  const merge::PlacedBox a{{DType::f6_e2m3, {3, 4}, left.data()}, {3, 8}, {0, 0}};
  const merge::PlacedBox b{{DType::f6_e2m3, {3, 4}, right.data()}, {3, 8}, {0, 4}};
  CHECK(crc_of_boxes(std::array{a, b}, 4, whole.nbytes()) == crc64(whole.bytes()));
  const Tensor odd = test::pattern(DType::u4, {3, 3}, 1);
  CHECK(crc_of_boxes(std::array{merge::PlacedBox{odd, {3, 3}, {0, 0}}}, 2, odd.nbytes()) == crc64(odd.bytes()));
  // Half a byte in the last dimension, which both boxes have completely.
  const Tensor thin = test::pattern(DType::u4, {3, 2, 1}, 1);
  const merge::PlacedBox first{{DType::u4, {1, 2, 1}, thin.data()}, {3, 2, 1}, {0, 0, 0}};
  const merge::PlacedBox others{{DType::u4, {2, 2, 1}, thin.data() + 1}, {3, 2, 1}, {1, 0, 0}};
  CHECK(crc_of_boxes(std::array{first, others}, 1, thin.nbytes()) == crc64(thin.bytes()));
  CHECK(has(words_of(ErrorKind::unsupported,
                     [&] {
                       (void)merge::in_bytes({{DType::u4, {1, 3}, odd.data()}, {3, 3}, {1, 0}}, "w");
                     }),
            "\"w\": packed elements of different parts would share a byte"));
}

TEST_CASE("the text of a fingerprint") {
  const std::string text = sample().text();
  const std::string lines =
      "995dc9bbdf1939fa  BF16 [4, 8]  a\n"
      "0000000000000001  F32 []  b\\x0a\\x5c\\xff\\xe2\\x80\\xae\n"
      "0000000000000000  U4 [0]  c  d\n";
  CHECK(text == lines + "model " + sample().hash() + "\n");
  CHECK(sample().hash().size() == 32);
  // XXH3-128 of no bytes, as xxh128sum prints it.
  CHECK(Fingerprint().text() == "model 99aa06d3014798d86001c324468d497f\n");
  CHECK(parse_fingerprint(text) == sample());
  CHECK(parse_fingerprint(Fingerprint().text()) == Fingerprint());
}

TEST_CASE("every other text is refused") {
  const std::string text = sample().text();
  for (std::size_t size = 0; size < text.size(); ++size) {
    CAPTURE(size);
    words_of(ErrorKind::corrupt, [&] { parse_fingerprint(text.substr(0, size)); });
  }
  for (std::size_t at = 0; at < text.size(); ++at) {
    CAPTURE(at);
    std::string changed = text;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    words_of(ErrorKind::corrupt, [&] { parse_fingerprint(changed); });
  }
  // Lines that text() does not write.
  const auto refused = [](const std::string& lines) {
    return words_of(ErrorKind::corrupt, [&] { parse_fingerprint(lines + "model 0\n"); });
  };
  CHECK(has(refused("995dc9bbdf1939fa BF16 [4, 8]  a\n"), "line 1: it is not of the form"));
  CHECK(has(refused("995DC9BBDF1939FA  BF16 [4, 8]  a\n"), "line 1: it is not of the form"));
  CHECK(has(refused("995dc9bbdf1939fa  BF16 [4,8]  a\n"), "line 1: it is not of the form"));
  CHECK(has(refused("995dc9bbdf1939fa  BF16 [-4]  a\n"), "line 1: it is not of the form"));
  CHECK(has(refused("995dc9bbdf1939fa  BF16 [99999999999999999999]  a\n"), "line 1: it is not of the form"));
  CHECK(has(refused("995dc9bbdf1939fa  BF17 [4]  a\n"), "line 1: it is not of the form"));
  CHECK(has(refused("995dc9bbdf1939fa  BF16 [4]  \\x41\n"), "line 1: it is not of the form"));
  CHECK(has(refused("995dc9bbdf1939fa  BF16 [4]  a\\\n"), "line 1: it is not of the form"));
  const std::string line = "995dc9bbdf1939fa  BF16 [4]  a\n";
  CHECK(has(refused(line + line), "line 2: the names are not in ascending order"));
  CHECK(has(refused(line), "line 2: the lines before it have another hash"));
  CHECK(has(words_of(ErrorKind::corrupt, [&] { parse_fingerprint(text + "\n"); }), "line 4: more lines follow"));
}

TEST_CASE("differences of fingerprints") {
  Fingerprint a{{{"content", {DType::f32, {2}}, 1},
                 {"dtype", {DType::f32, {2}}, 1},
                 {"equal", {DType::f32, {2}}, 1},
                 {"missing", {DType::f32, {2}}, 1},
                 {"shape", {DType::f32, {2}}, 1}}};
  Fingerprint b{{{"content", {DType::f32, {2}}, 2},
                 {"dtype", {DType::bf16, {3}}, 1},
                 {"equal", {DType::f32, {2}}, 1},
                 {"extra", {DType::f32, {2}}, 1},
                 {"shape", {DType::f32, {2, 1}}, 1}}};
  std::string found;
  for (const FingerprintDifference& difference : differences(a, b))
    found += std::string(to_string(difference.defect)) + " " + to_string(difference) + "\n";
  CHECK(found ==
        "content \"content\": content differs (expected 0000000000000001, found 0000000000000002)\n"
        "dtype \"dtype\": dtype differs (expected F32 [2], found BF16 [3])\n"
        "extra \"extra\": not expected (F32 [2])\n"
        "missing \"missing\": missing (expected F32 [2])\n"
        "shape \"shape\": shape differs (expected F32 [2], found F32 [2, 1])\n");
  CHECK(differences(a, a).empty());
}

TEST_CASE("the fingerprint of a model does not depend on its files, and shards have that of the model") {
  const test::TemporaryDirectory work;
  std::vector<float> numbers(64 * 40'000);
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = std::sin(static_cast<float>(i));
  const std::vector<NamedTensor> tensors = {
      {"model.embed_tokens.weight", Tensor::take(std::move(numbers), {64, 40'000})},
      {"model.norm.weight", test::pattern(DType::bf16, {40'000}, 2)}};
  std::filesystem::create_directory(work / "one");
  std::filesystem::create_directory(work / "two");
  test::write_tensors(work / "one/model.safetensors", tensors);
  test::write_tensors(work / "two/model-00001-of-00002.safetensors", {tensors[1]});
  test::write_tensors(work / "two/model-00002-of-00002.safetensors", {tensors[0]});
  test::write_text(work / "two/model.safetensors.index.json",
                   R"({"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors",
                       "model.embed_tokens.weight": "model-00002-of-00002.safetensors"}})");
  const Fingerprint one = fingerprint_of(work / "one");
  REQUIRE(one.tensors.size() == 2);
  for (const auto& [name, tensor] : tensors) {
    const auto place = std::ranges::find(one.tensors, name, &TensorFingerprint::name);
    CHECK(place->crc == crc64(tensor.bytes()));
    CHECK(place->spec == TensorSpec{tensor.dtype(), tensor.shape()});
  }
  CHECK(fingerprint_of(work / "two") == one);
  CHECK(fingerprint_of(work / "one/model.safetensors") == one);
  test::write_text(work / "plan.json", R"({"muster_plan": 1, "rules": [
    {"match": "*embed*", "action": "concat", "dim": 1}, {"match": "*", "action": "same"}]})");
  shard_model(work / "one", work / "shards", {.tensor = 3}, work / "plan.json");
  CHECK(fingerprint_of(work / "shards") == one);
  const Fingerprint norm = fingerprint_of(work / "shards", {.select = "*norm*"});
  CHECK(norm.tensors == std::vector{one.tensors[1]});
  CHECK(fingerprint_of(work / "two", {.exclude = "*norm*"}).tensors == std::vector{one.tensors[0]});

  // A cast while the model is read has the fingerprint of the cast model.
  export_model(work / "one", work / "cast", "", *single_group(), {.dtype = DType::bf16, .cast_all = true});
  const Fingerprint cast = fingerprint_of(work / "cast");
  CHECK(cast != one);
  for (const char* path : {"one", "two", "one/model.safetensors"})
    CHECK(fingerprint_of(work / path, {.dtype = DType::bf16, .cast_all = true}) == cast);
  CHECK(has(words_of(ErrorKind::not_found, [&] { fingerprint_of(work / "one", {.select = "nothing"}); }),
            "no tensor name matches"));
  words_of(ErrorKind::not_found, [&] { fingerprint_of(work / "nowhere"); });
}
