// SPDX-License-Identifier: Apache-2.0
// The output of muster show and muster diff.

#include <doctest/doctest.h>
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>

#include "muster/error.hpp"
#include "muster/model_dir.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/inspect/elements.hpp"
#include "src/inspect/output.hpp"
#include "src/inspect/reports.hpp"
#include "src/inspect/show.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::inspect;
using namespace muster::test;

namespace {

template <class T>
Tensor tensor_of(DType dtype, Shape shape, const std::vector<T>& values) {
  Tensor tensor = Tensor::allocate(dtype, std::move(shape));
  REQUIRE(tensor.nbytes() == values.size() * sizeof(T));
  std::memcpy(tensor.mutable_data(), values.data(), tensor.nbytes());
  return tensor;
}

template <class T>
ValueDifference difference(DType dtype, const std::vector<T>& a, const std::vector<T>& b) {
  return compare_values(dtype, std::as_bytes(std::span(a)), std::as_bytes(std::span(b)));
}

std::string json_of(const std::string& path, const ShowOptions& options, std::size_t* longest = nullptr) {
  std::string json;
  show_json(open_source(path), options, [&](std::string_view piece) {
    json += piece;
    if (longest != nullptr) *longest = std::max(*longest, piece.size());
  });
  return json;
}

}  // namespace

TEST_CASE("text from files cannot control a terminal") {
  CHECK(printable("plain.name \u00fc") == "plain.name \u00fc");
  CHECK(printable("\x1b[2J\n\t\\\x7f") == "\\x1b[2J\\n\\t\\\\\\x7f");
  CHECK(printable("\u009b31m\u202eabc\u200b") == "\\u009b31m\\u202eabc\\u200b");
  CHECK(printable("\xff\xc3(") == "\\xff\\xc3(");
  CHECK(in_quotes("\"\u009b\u202e\xff\x1b\"") == "\"\\\"\\u009b\\u202e\\xff\\x1b\\\"\"");
  CHECK(std::string(Error(ErrorKind::io, "opening \x1b[31m\u202e\n: \\x1b").what()) ==
        "opening \\x1b[31m\\u202e\\n: \\x1b");
  CHECK(json_report("\u009b\u202e\x7f\u00fc") == "\"\\u009b\\u202e\\u007f\u00fc\"\n");
  CHECK(json_report("\U000e0001") == "\"\\udb40\\udc01\"\n");
  CHECK(shorten("model.layers.11.mlp.weight", 14) == "mod...p.weight");
  CHECK(columns(shorten("\u00fc\u00fc\u00fc\u00fc\u00fc\u00fc\u00fc\u00fc\u00fc\u00fc", 8)) == 8);
  CHECK(shorten("short", 5) == "short");
  CHECK(human_bytes(999) == "999 B");
  CHECK(human_bytes(1000) == "1.0 kB");
  CHECK(human_bytes(999'949) == "999.9 kB");
  CHECK(human_bytes(999'951) == "1.0 MB");
  CHECK(human_bytes(UINT64_MAX) == "18.4 EB");
}

TEST_CASE("show: a table, totals, metadata") {
  const TemporaryDirectory directory;
  const std::string path = directory / "m.safetensors";
  write_tensors(path,
                {{"layers.1.weight", tensor_of<float>(DType::f32, {2, 2}, {1, 2, 3, 4})},
                 {"layers.0.weight", tensor_of<float>(DType::f32, {3}, {1, 2, 3})},
                 {"x\x1b[31m", tensor_of<std::uint8_t>(DType::u8, {}, {1})}},
                {{"format", "pt\n"}});
  const std::string text = show_text(open_source(path));
  CHECK(text == printable(path) +
                    ": 3 tensors, 29 B\n\n"
                    "NAME             DTYPE  SHAPE   SIZE\n"
                    "layers.0.weight  F32    [3]     12 B\n"
                    "layers.1.weight  F32    [2, 2]  16 B\n"
                    "x\\x1b[31m        U8     []       1 B\n\n"
                    "U8       1 tensor, 1 B\n"
                    "F32      2 tensors, 28 B\n"
                    "metadata format: pt\\n\n");
  const std::string by_size = show_text(open_source(path), {.order = ShowOrder::size});
  CHECK(by_size.find("layers.1") < by_size.find("layers.0"));
  const std::string chosen = show_text(open_source(path), {.filter = {.select = "layers.*"}});
  CHECK(has(chosen, "2 tensors, 28 B (of 3 tensors)"));
  CHECK(chosen.find("x1b") == std::string::npos);
  CHECK_THROWS_WITH_AS(show_text(open_source(path), {.filter = {.select = "none"}}),
                       doctest::Contains("no tensor name matches \"none\". List its 3 tensors with muster ls."), Error);

  const Config json = parse_json(json_of(path, {.order = ShowOrder::name}));
  CHECK(json.at("tensors").at(1).at("name").as_string() == "layers.1.weight");
  CHECK(json.at("tensors").at(1).at("shape").at(1).as_int() == 2);
  CHECK(json.at("tensors").at(2).at("name").as_string() == "x\x1b[31m");
  CHECK(json.at("totals").at("bytes").as_int() == 29);
  CHECK(json.at("totals").at("dtypes").at("F32").at("tensors").as_int() == 2);
  CHECK(json.at("metadata").at("format").as_string() == "pt\n");
}

TEST_CASE("show: JSON of many tensors is written in small pieces") {
  const TemporaryDirectory directory;
  const std::string path = directory / "m.safetensors";
  std::vector<NamedTensor> tensors;
  for (int i = 0; i < 1000; ++i)
    tensors.emplace_back("w" + std::to_string(i), tensor_of<std::uint8_t>(DType::u8, {1}, {1}));
  write_tensors(path, tensors);
  std::size_t longest = 0;
  const Config json = parse_json(json_of(path, {}, &longest));
  CHECK(json.at("tensors").size() == 1000);
  CHECK(json.at("totals").at("tensors").as_int() == 1000);
  CHECK(longest < 2000);
  write_tensors(path, {});
  CHECK(parse_json(json_of(path, {})).at("tensors").size() == 0);
}

TEST_CASE("show: no line is longer than the terminal") {
  const TemporaryDirectory directory;
  const std::string path = directory / "m.safetensors";
  write_tensors(path,
                {{std::string(200, 'a') + ".weight", tensor_of<float>(DType::f32, {1}, {1})},
                 {"\u00fc" + std::string(100, 'b'), tensor_of<float>(DType::f32, {1, 1}, {1})}},
                {{"key", std::string(300, 'v')}});
  std::istringstream lines(show_text(open_source(path), {.style = {.width = 80}}));
  std::string line;
  std::getline(lines, line);  // the path is the user's
  int count = 0;
  while (std::getline(lines, line)) {
    CHECK(columns(line) <= 80);
    ++count;
  }
  CHECK(count == 7);
}

TEST_CASE("values: every dtype is decoded correctly") {
  using u8s = std::vector<std::uint8_t>;
  using u16s = std::vector<std::uint16_t>;
  CHECK(difference(DType::f16, u16s{0x3c00}, u16s{0xc000}).absolute == 3);        // 1, -2
  CHECK(difference(DType::f16, u16s{0x0001}, u16s{0x0000}).absolute == 0x1p-24);  // subnormal
  CHECK(difference(DType::f16, u16s{0x7bff}, u16s{0}).absolute == 65504);
  CHECK(std::isinf(difference(DType::f16, u16s{0x7c00}, u16s{0}).absolute));
  CHECK(difference(DType::bf16, u16s{0x3f80}, u16s{0x4000}).absolute == 1);
  CHECK(difference(DType::bf16, u16s{0x3f80}, u16s{0x4000}).relative == 0.5);
  CHECK(difference(DType::f8_e4m3fn, u8s{0x7e}, u8s{0}).absolute == 448);
  CHECK(difference(DType::f8_e4m3fn, u8s{0x01}, u8s{0}).absolute == 0x1p-9);
  CHECK(difference(DType::f8_e4m3fn, u8s{0xff}, u8s{0}).nans == 1);
  CHECK(difference(DType::f8_e5m2, u8s{0x7b}, u8s{0}).absolute == 57344);
  CHECK(std::isinf(difference(DType::f8_e5m2, u8s{0xfc}, u8s{0}).absolute));
  CHECK(difference(DType::f8_e8m0, u8s{128}, u8s{126}).absolute == 1.5);
  CHECK(difference(DType::f8_e8m0, u8s{255}, u8s{126}).nans == 1);
  CHECK(difference(DType::f4_e2m1, u8s{0x7f}, u8s{0x70}).absolute == 6);  // -6, 0 in the low nibble
  CHECK(difference(DType::f4_e2m1, u8s{0x7f}, u8s{0xf7}).absolute == 12);
  CHECK(difference(DType::f4_e2m1, u8s{0x7f}, u8s{0xf7}).elements == 2);
  CHECK(difference(DType::f8_e4m3fnuz, u8s{0x7f}, u8s{0xff}).absolute == 480);
  CHECK(difference(DType::f8_e5m2fnuz, u8s{0x7f}, u8s{0x00}).absolute == 57344);
  CHECK(difference(DType::f8_e5m2fnuz, u8s{0x80}, u8s{0x00}).nans == 1);
  // The second of four elements in three bytes: 7.5 and 28, the largest values of their formats.
  CHECK(difference(DType::f6_e2m3, u8s{0xc0, 0x07, 0x00}, u8s{0, 0, 0}).absolute == 7.5);
  CHECK(difference(DType::f6_e3m2, u8s{0xc0, 0x07, 0x00}, u8s{0, 0, 0}).absolute == 28);
  CHECK(value_text(DType::f6_e2m3, 0x1f) == "7.5");
  CHECK(difference(DType::u4, u8s{0x0f}, u8s{0x00}).absolute == 15);
  CHECK(difference(DType::i4, u8s{0x08}, u8s{0x07}).absolute == 15);
  CHECK(difference(DType::i8, std::vector<std::int8_t>{-128}, std::vector<std::int8_t>{127}).absolute == 255);
  CHECK(difference(DType::i64, std::vector<std::int64_t>{INT64_MIN}, std::vector<std::int64_t>{INT64_MAX}).absolute ==
        0x1p64);
  CHECK(difference(DType::u64, std::vector<std::uint64_t>{1ULL << 63}, std::vector<std::uint64_t>{(1ULL << 63) + 1})
            .absolute == 1);
  CHECK(difference(DType::f64, std::vector<double>{1, 2, 3}, std::vector<double>{1, 2.5, 3}).elements == 1);
  CHECK(difference(DType::f32, std::vector<float>{0}, std::vector<float>{-0.0F}).elements == 1);
  CHECK(difference(DType::f32, std::vector<float>{0}, std::vector<float>{-0.0F}).absolute == 0);
  CHECK(difference(DType::complex64, std::vector<float>{1, 2}, std::vector<float>{1, 5}).absolute == 3);
  CHECK(difference(DType::boolean, u8s{1, 0}, u8s{0, 0}).elements == 1);
}

TEST_CASE("diff: the same model, in other files and with different white space in its JSON") {
  const TemporaryDirectory a;
  const TemporaryDirectory b;
  const Tensor x = tensor_of<float>(DType::f32, {2}, {1, std::nanf("1")});
  const Tensor y = tensor_of<std::uint8_t>(DType::u4, {3}, {0x21, 0x03});
  write_tensors(a / "model.safetensors", {{"x", x}, {"y", y}}, {{"format", "pt"}});
  write_tensors(b / "model-00001-of-00002.safetensors", {{"y", y}});
  write_tensors(b / "model-00002-of-00002.safetensors", {{"x", x}});
  write_text(a / "config.json", R"({"a": 1, "b": [1, 2]})");
  write_text(b / "config.json", "{\"b\":[1,2],\n\"a\":1}");
  write_text(a / "vocab.txt", "one\n");
  write_text(b / "vocab.txt", "one\n");
  const Config report = diff_models(a.path().string(), b.path().string());
  CHECK(report.at("same").as_bool());
  CHECK(diff_text(report) ==
        "note: the headers have different metadata (muster show); this does not count as a difference\n"
        "same: 2 tensors, 10 B, 2 other files\n");
}

TEST_CASE("diff: every kind of difference") {
  const TemporaryDirectory a;
  const TemporaryDirectory b;
  const auto f32 = [](std::vector<float> values) {
    const Shape shape = {static_cast<std::int64_t>(values.size())};
    return tensor_of<float>(DType::f32, shape, values);
  };
  write_tensors(a / "model.safetensors", {{"only_a", f32({1})},
                                          {"same", f32({1})},
                                          {"shape", f32({1, 2})},
                                          {"type", tensor_of<std::uint16_t>(DType::bf16, {1}, {0})},
                                          {"value", f32({1, 2, 4, std::nanf("")})}});
  write_tensors(b / "model.safetensors", {{"only_b\n", f32({1})},
                                          {"same", f32({1})},
                                          {"shape", tensor_of<float>(DType::f32, {1, 2}, {1, 2})},
                                          {"type", tensor_of<std::uint16_t>(DType::f16, {1}, {0})},
                                          {"value", f32({1, 2.5, 3, 0})}});
  write_text(a / "config.json", R"({"hidden": 768, "list": [1, {"deep": "a"}], "gone": null})");
  write_text(b / "config.json", R"({"hidden": 1024, "list": [1, {"deep": "\u001b[2J"}], "new": {}})");
  write_text(a / "bytes.bin", "abc");
  write_text(b / "bytes.bin", "abd");
  write_text(a / "broken.json", "{");
  write_text(b / "broken.json", "{}");
  write_text(b / "extra.txt", "");
  const Config report = diff_models(a.path().string(), b.path().string());
  CHECK_FALSE(report.at("same").as_bool());
  CHECK(diff_text(report) ==
        "tensor only_a: only in A: F32 [1]\n"
        "tensor shape: F32 [2] / F32 [1, 2]\n"
        "tensor type: BF16 [1] / F16 [1]\n"
        "tensor value: F32 [4]: 3 of 4 values differ, by at most 1 (0.25 relative), 1 NaN on one side\n"
        "tensor only_b\\n: only in B: F32 [1]\n"
        "file broken.json: 1 bytes / 2 bytes\n"
        "file bytes.bin: bytes differ from offset 2\n"
        "file config.json: hidden: 768 / 1024, list[1].deep: \"a\" / \"\\u001b[2J\", gone: null / nothing and 1 more\n"
        "file extra.txt: only in B\n"
        "different: 5 tensors and 4 other files (compared: 2 tensors, 20 B, 3 other files)\n");
  CHECK(report.at("tensor_differences").at(3).at("absolute").as_double() == 1);
  CHECK(report.at("tensor_differences").at(3).at("nans").as_int() == 1);
  CHECK(report.at("tensor_differences").at(0).at("kind").as_string() == "only in A");
  CHECK(report.at("file_differences").at(3).at("name").as_string() == "extra.txt");
  CHECK(diff_models(a / "model.safetensors", b / "model.safetensors").at("file_differences").size() == 0);
}

TEST_CASE("diff: large tensors in pieces, the difference in the last one") {
  const TemporaryDirectory directory;
  const std::int64_t count = 5 * 1024 * 1024 + 3;
  std::vector<float> values(static_cast<std::size_t>(count), 1);
  write_tensors(directory / "a.safetensors", {{"t", tensor_of<float>(DType::f32, {count}, values)}});
  values.front() = 3;
  values.back() = 2;
  write_tensors(directory / "b.safetensors", {{"t", tensor_of<float>(DType::f32, {count}, values)}});
  CHECK(diff_models(directory / "a.safetensors", directory / "a.safetensors").at("same").as_bool());
  const Config report = diff_models(directory / "a.safetensors", directory / "b.safetensors");
  REQUIRE(report.at("tensor_differences").size() == 1);
  const Config& difference = report.at("tensor_differences").at(0);
  CHECK(difference.at("differing").as_int() == 2);
  CHECK(difference.at("compared").as_int() == count);
  CHECK(difference.at("absolute").as_double() == 2);
  CHECK(report.at("bytes").as_int() == count * 4);
}
