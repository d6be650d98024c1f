// SPDX-License-Identifier: Apache-2.0
// Views of plans: the moved elements are compared with independent loops, and invalid views are refused.

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "muster/plan.hpp"
#include "muster/state.hpp"
#include "src/checkpoint/plan/plan_views.hpp"
#include "src/merge/cast.hpp"
#include "src/merge/view.hpp"
#include "tests/support/memory_source.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using test::has;
using test::words_of;

namespace {

const char* const views_config =
    R"({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 8, "num_key_value_heads": 4,
"head_dim": 4, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 37, "num_hidden_layers": 2})";

/// Returns the positions in the whole tensor of a view's elements, read window by window.
std::vector<std::int64_t> numbers_of(const merge::StridedBox& box, std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> found(static_cast<std::size_t>(end - begin), -1);
  for (const merge::StridedBox& part : merge::clipped(box, begin, end)) {
    std::vector<std::int64_t> index(part.axes.size(), 0);
    while (true) {
      std::int64_t from = part.from;
      std::int64_t to = part.to;
      for (std::size_t i = 0; i < index.size(); ++i) {
        from += index[i] * part.axes[i].from;
        to += index[i] * part.axes[i].to;
      }
      REQUIRE(to >= begin);
      REQUIRE(to < end);
      auto& place = found[static_cast<std::size_t>(to - begin)];
      REQUIRE(place == -1);
      place = from;
      std::size_t axis = index.size();
      while (axis > 0 && ++index[axis - 1] == part.axes[axis - 1].count) index[--axis] = 0;
      if (axis == 0) break;
    }
  }
  return found;
}

}  // namespace

TEST_CASE("a view has the elements that loops find, in every window, and its inverse restores the tensor") {
  // [g = 2, (3 of 5), D = 4] of the rows, transposed, of one of three items.
  const Shape whole = {3, 40, 6};
  const merge::View view =
      merge::View(whole).item(1).slice(0, std::vector<std::int64_t>{2, 5, 4}, 1, 2, 3).transposed();
  REQUIRE(view.shape() == Shape{6, 24});
  std::vector<std::int64_t> wanted;
  for (std::int64_t c = 0; c < 6; ++c)
    for (std::int64_t g = 0; g < 2; ++g)
      for (std::int64_t h = 2; h < 5; ++h)
        for (std::int64_t d = 0; d < 4; ++d) wanted.push_back(240 + ((g * 5 + h) * 4 + d) * 6 + c);
  const merge::StridedBox box = view.box();
  for (std::int64_t begin = 0; begin < 144; begin += 5)
    for (std::int64_t end = begin + 1; end <= 144; end += 7)
      REQUIRE(numbers_of(box, begin, end) == std::vector(wanted.begin() + begin, wanted.begin() + end));
  const merge::StridedBox back = merge::reversed(box);
  const std::vector<std::int64_t> found = numbers_of(back, 0, 720);
  for (std::size_t i = 0; i < wanted.size(); ++i)
    CHECK(found[static_cast<std::size_t>(wanted[i])] == static_cast<std::int64_t>(i));
  CHECK(std::ranges::count(found, -1) == 720 - 144);

  const merge::View halves =
      merge::View({8, 3}).reordered(0, std::vector<std::int64_t>{2, 2, 2}, std::vector<std::size_t>{0, 2, 1});
  CHECK(halves.shape() == Shape{8, 3});
  CHECK(numbers_of(halves.box(), 0, 24) == std::vector<std::int64_t>{0,  1,  2,  6,  7,  8,  3,  4,  5,  9,  10, 11,
                                                                     12, 13, 14, 18, 19, 20, 15, 16, 17, 21, 22, 23});
  CHECK(has(words_of(ErrorKind::invalid_argument,
                     [] {
                       (void)merge::View({9, 3}).slice(0, std::vector<std::int64_t>{2, 4}, 1, 0, 1);
                     }),
            "dimension 0 of shape [9, 3] cannot be split into 2 x 4"));
}

TEST_CASE("a large transpose has the same values in windows and as a whole") {
  test::MemorySource source;
  constexpr std::int64_t rows = 700;
  constexpr std::int64_t columns = 1100;
  std::vector<std::byte> bytes(rows * columns * 2);
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    const auto value = static_cast<std::uint16_t>(i * 7919);
    std::memcpy(bytes.data() + i * 2, &value, 2);
  }
  source.add("w", DType::bf16, {rows, columns}, bytes);
  const ViewedTensors viewed(
      source,
      {{"t", {DType::bf16, {columns, rows}}, DType::bf16, false, {merge::View({rows, columns}).transposed().box()}}});
  std::vector<std::byte> all(bytes.size());
  viewed.read(0, 0, all);
  for (std::int64_t c = 0; c < columns; ++c)
    for (std::int64_t r = 0; r < rows; ++r)
      REQUIRE(std::memcmp(all.data() + (c * rows + r) * 2, bytes.data() + (r * columns + c) * 2, 2) == 0);
  for (const std::uint64_t step : {2UL, 1398UL, 100'000UL}) {
    std::vector<std::byte> part(step);
    for (const std::uint64_t at : {0UL, 2UL, 700'002UL, bytes.size() - step}) {
      viewed.read(0, at, part);
      REQUIRE(std::memcmp(part.data(), all.data() + at, step) == 0);
    }
  }
}

TEST_CASE("casts round to the nearest, ties to even, and report values that become infinite") {
  const auto cast_one = [](auto value, DType from, DType to) {
    std::uint32_t out = 0;
    const auto infinite = merge::cast(from, std::as_bytes(std::span(&value, 1)), to,
                                      std::as_writable_bytes(std::span(&out, 1)).first(itemsize(to)));
    return std::pair(out, infinite.has_value());
  };
  const auto from_bits = [](std::uint32_t bits) { return std::bit_cast<float>(bits); };
  CHECK(cast_one(from_bits(0x3f808000), DType::f32, DType::bf16) == std::pair(0x3f80U, false));
  CHECK(cast_one(from_bits(0x3f818000), DType::f32, DType::bf16) == std::pair(0x3f82U, false));
  CHECK(cast_one(from_bits(0x3f808001), DType::f32, DType::bf16) == std::pair(0x3f81U, false));
  CHECK(cast_one(from_bits(0x00000001), DType::f32, DType::bf16) == std::pair(0x0000U, false));
  CHECK(cast_one(from_bits(0x00018000), DType::f32, DType::bf16) == std::pair(0x0002U, false));
  CHECK(cast_one(from_bits(0x7fa00000), DType::f32, DType::bf16) == std::pair(0x7fc0U, false));
  CHECK(cast_one(from_bits(0xff800000), DType::f32, DType::bf16) == std::pair(0xff80U, false));
  CHECK(cast_one(from_bits(0x7f7fffff), DType::f32, DType::bf16) == std::pair(0x7f80U, true));
  CHECK(cast_one(65519.0F, DType::f32, DType::f16) == std::pair(0x7bffU, false));
  CHECK(cast_one(65520.0F, DType::f32, DType::f16) == std::pair(0x7c00U, true));
  CHECK(cast_one(std::uint16_t{0x0001}, DType::f16, DType::f32) == std::pair(0x33800000U, false));
  CHECK(cast_one(1e39, DType::f64, DType::f32) == std::pair(0x7f800000U, true));
  // Rounded to a float first, this value would be a tie.
  CHECK(cast_one(1.0 + std::ldexp(1.0, -8) + std::ldexp(1.0, -40), DType::f64, DType::bf16) ==
        std::pair(0x3f81U, false));
  CHECK(cast_one(1.0 + std::ldexp(1.0, -8) - std::ldexp(1.0, -40), DType::f64, DType::bf16) ==
        std::pair(0x3f80U, false));
  CHECK_FALSE(merge::can_cast(DType::f8_e4m3fn, DType::f32));
  CHECK_FALSE(merge::can_cast(DType::f32, DType::f8_e4m3fn));
}

TEST_CASE("views that contradict themselves, the model or the ranks are one clear error") {
  const Config config = parse_json(views_config);
  const auto error = [&](const std::string& view, const Shape& shape, int ranks = 1, DType dtype = DType::f32) {
    return words_of(ErrorKind::invalid_argument, [&] {
      const MergePlan plan = MergePlan::parse(
          R"({"muster_plan": 1, "views": [)" + view + R"(], "rules": [{"match": "*", "action": "same"}]})", "p",
          &config);
      view_rank(plan, {.tensor = ranks}, {{{"a.weight", {dtype, shape}}, {"b", {DType::f32, {3}}}}, {}});
    });
  };
  const std::string groups = R"({"match": "a.*", "split": {"groups": ["num_attention_heads", "num_key_value_heads",
      "num_key_value_heads"]}, "to": ["q.$1", "k.$1", "v.$1"]})";
  CHECK(has(error(groups, {60, 2}),
            "plan \"p\": view 1: tensor \"a.weight\": its size 60 along dimension 0 is not a "
            "multiple of 4 parts of [2, 1, 1]"));
  CHECK(has(error(groups, {64, 2}, 6), "6 ranks do not divide the 4 groups"));
  CHECK(has(error(groups, {9, 2}, 8), "2 ranks share a group of [2, 1, 1] heads, which is not a multiple of 9"));
  CHECK(has(error(groups, {96, 2}), "it has a gate for each query head. Use \"gated_groups\""));
  std::string gated = groups;
  gated.replace(gated.find("groups"), 6, "gated_groups");
  CHECK(has(error(gated, {96, 2}, 8), "8 ranks do not divide the 4 groups"));
  for (const std::string by : {"groups", "gated_groups"})
    CHECK(has(error(R"({"match": "a.*", "split": {")" + by + R"(": [6, 4, 4]}, "to": ["x", "y", "z"]})", {96, 2}),
              "6 heads are not a multiple of 4 groups"));
  CHECK(has(error(R"({"match": "a.*", "split": {"blocks": [1, 2], "dim": 2}, "to": ["x", "y"]})", {6, 2}),
            "dimension 2 is out of range for the shape [6, 2]"));
  CHECK(has(error(R"({"match": "a.*", "split": {"blocks": ["no_such", 2]}, "to": ["x", "y"]})", {6, 2}),
            "\"no_such\" of config.json is needed, but the key is missing"));
  CHECK(has(error(R"({"match": "*", "transpose": true})", {6, 2}),
            "tensor \"b\": dimension -2 is out of range for shape [3]"));
  CHECK(has(error(R"({"match": "a.*", "permute_rope": "num_attention_heads"})", {24, 2}), "no 8 heads of two halves"));
  CHECK(has(error(R"({"match": "a.*", "to": "b"})", {6, 2}), "it becomes \"b\", as does \"a.weight\""));
  CHECK(has(error(R"({"match": "a.*", "cast": "BF16"})", {6, 2}, 1, DType::f8_e4m3fn), "F8_E4M3 is quantised"));
  CHECK(has(error(R"({"match": "a.*", "transpose": true})", {6, 2}, 1, DType::f4_e2m1), "share a byte"));

  const auto refused = [](const std::string& view) {
    return words_of(ErrorKind::corrupt, [&] {
      MergePlan::parse(R"({"muster_plan": 1, "views": [)" + view + R"(], "rules": [{"match": "*", "action": "same"}]})",
                       "p");
    });
  };
  CHECK(
      has(refused(R"({"match": "a", "split": {"blocks": [1, 1]}, "to": "x"})"), "view 1 (line 1): \"to\" has 1 names"));
  CHECK(has(refused(R"({"match": "a", "split": {"dim": 1}, "to": ["x", "y"]})"), "neither \"blocks\" nor"));
  CHECK(has(refused(R"({"match": "a", "split": {"blocks": [1, 1], "heads": [1, 1]}, "to": ["x", "y"]})"),
            "more than one of"));
  CHECK(has(refused(R"({"match": "a", "unstack": true, "to": "x"})"), "needs one \"#\""));
  CHECK(has(refused(R"({"match": "a", "drop": "why", "to": "x"})"), "\"drop\" and \"to\" contradict each other"));
  CHECK(has(refused(R"({"match": "a", "cast": "F8_E4M3"})"), "not one of F32, F16, BF16"));
  CHECK(has(refused(R"({"match": "a", "turn": 1})"), "unknown key \"turn\""));
}

TEST_CASE("an inverted view that loses elements, or lacks a part, is one clear error") {
  const Config config = parse_json(views_config);
  const auto error = [&](const std::string& view, const std::vector<NamedSpec>& tensors) {
    return words_of(ErrorKind::invalid_argument, [&] {
      const MergePlan plan = MergePlan::parse(
          R"({"muster_plan": 1, "views": [)" + view + R"(], "rules": [{"match": "*", "action": "same"}]})", "p",
          &config);
      unview_rank(plan, {}, tensors);
    });
  };
  const std::string halves = R"({"match": "*.w", "split": {"blocks": [1, 1]}, "to": ["$1.a", "$1.b"]})";
  const TensorSpec spec{DType::f32, {4, 2}};
  CHECK(has(error(halves, {{"x.a", spec}}), "tensor \"x.w\": its part \"$1.b\" is missing"));
  CHECK(has(error(halves, {{"x.a", spec}, {"x.b", {DType::f32, {6, 2}}}}),
            "its part \"x.a\" is [4, 2], expected [5, 2]"));
  CHECK(has(error(halves, {{"x.a", spec}, {"x.b", {DType::f16, {4, 2}}}}), "have different dtypes"));
  CHECK(has(error(halves, {{"x.a", {DType::f32, {1}}}, {"x.b", {DType::f32, {1}}}}),
            "each part has a scale of one element, and the whole tensor would need a common one"));
  CHECK(has(error(halves, {{"x.w", spec}}), "is not invertible"));
  CHECK(has(error(R"({"match": "*.w", "cast": "BF16"})", {{"x.w", spec}}), "a cast is not invertible"));
  CHECK(has(error(R"({"match": "s.*", "unstack": true, "to": "l.#.$1"})", {{"l.0.w", spec}, {"l.2.w", spec}}),
            "item 1 is missing, and item 2 exists"));
}

TEST_CASE("every part of a fused matrix gets a scale with one element per layer") {
  const Config config = parse_json(views_config);
  const MergePlan plan = MergePlan::load("megatron", &config);
  for (const Shape& shape : {Shape{2}, Shape{2, 1}}) {
    const ViewedRank viewed = view_rank(
        plan, {}, {{{"decoder.layers.self_attention.linear_qkv.input_quantizer._amax", {DType::f32, shape}}}, {}});
    REQUIRE(viewed.tensors.tensors.size() == 6);
    CHECK(viewed.tensors.tensors[4].name == "model.layers.1.self_attn.k_proj.input_quantizer._amax");
    CHECK(viewed.tensors.tensors[4].spec.shape == Shape(shape.begin() + 1, shape.end()));
    CHECK(viewed.views[4].boxes.front().from == 1);
  }
}

TEST_CASE("stacked layers are separated and stacked, under a prefix, and other tensors are left out") {
  const MergePlan plan = MergePlan::parse(
      R"({"muster_plan": 1, "at": "model.", "views": [{"match": "s.*", "unstack": true, "transpose": true,
          "to": "layers.#.$1"}], "rules": [{"match": "*", "action": "same"}]})",
      "p");
  const ViewedRank viewed = view_rank(
      plan, {},
      {{{"model.s.w", {DType::f32, {3, 4, 2}}}, {"model.n", {DType::f32, {5}}}, {"optimizer.x", {DType::f32, {5}}}},
       {}});
  REQUIRE(viewed.tensors.tensors.size() == 4);
  CHECK(viewed.tensors.tensors[1].name == "layers.1.w");
  CHECK(viewed.tensors.tensors[1].spec.shape == Shape{2, 4});
  CHECK(viewed.views[1].boxes.front().from == 8);
  REQUIRE(viewed.left_out.size() == 1);
  CHECK(viewed.left_out.front().reason == "its name does not begin with \"model.\"");
  const std::vector<ViewedTensor> back = unview_rank(plan, {}, viewed.tensors.tensors);
  REQUIRE(back.size() == 2);
  CHECK(back[0].name == "model.s.w");
  CHECK(back[0].spec.shape == Shape{3, 4, 2});
  CHECK(back[1].name == "model.n");
}
