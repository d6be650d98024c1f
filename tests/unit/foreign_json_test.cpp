// SPDX-License-Identifier: Apache-2.0
// Third-party config.json and other JSON files: Muster reads everything that Python reads. An update of a config
// rewrites only the changed members.

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "muster/model_dir.hpp"
#include "muster/state.hpp"
#include "src/checkpoint/assembly/base_model.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/formats/json_text.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::test;

namespace {

struct TolerantCase {
  std::string text;
  std::string tree;  ///< the same tree as Muster writes it
};

std::vector<TolerantCase> tolerant_cases() {
  const std::string deep = std::string(200, '[') + std::string(200, ']');
  return {
      {R"({"a": NaN, "b": Infinity, "c": -Infinity})",
       R"({"a":{"$float":"nan"},"b":{"$float":"inf"},"c":{"$float":"-inf"}})"},
      {R"({"time_step_limit":[0.0,Infinity]})", R"({"time_step_limit":[0.0,{"$float":"inf"}]})"},
      {R"({"a": 1, "b": 2, "a": [3]})", R"({"a":[3],"b":2})"},
      {R"([9223372036854775807, 18446744073709551615, -9223372036854775808])",
       R"([9223372036854775807,18446744073709551615,-9223372036854775808])"},
      {R"([18446744073709551616, -9223372036854775809])", R"([18446744073709551616.0,-9223372036854775808.0])"},
      {R"([1e400, -1E+400, 1e-400, 1E5, 1e30])", R"([{"$float":"inf"},{"$float":"-inf"},0.0,1e+05,1e+30])"},
      {R"({"\ud83d\ude00": "\ud800", "b": "\udc00x\\ud800", "c": "\ud800\ud83d\ude00"})",
       "{\"\xf0\x9f\x98\x80\":\"\xef\xbf\xbd\",\"b\":\"\xef\xbf\xbdx\\\\ud800\",\"c\":"
       "\"\xef\xbf\xbd\xf0\x9f\x98\x80\"}"},
      {"\xef\xbb\xbf{\"a\": 1}\r\n", R"({"a":1})"},
      {R"({"$float": 5, "NaN": "Infinity NaN -Infinity"})", R"({"$float":5,"NaN":"Infinity NaN -Infinity"})"},
      {R"({"$float": 5})", R"({"$float":5})"},
      {R"({"a\"NaN": true, "b": [null, false, {}], "": []})", R"({"a\"NaN":true,"b":[null,false,{}],"":[]})"},
      {deep, deep},
  };
}

}  // namespace

TEST_CASE("third-party JSON is read as Python reads it") {
  for (const TolerantCase& one : tolerant_cases()) {
    CAPTURE(one.text);
    const Config tree = core::parse_tolerantly(one.text);
    const std::string words = one.text.find("$float\": 5}") == std::string::npos ? to_json(tree) : one.tree;
    CHECK(words == one.tree);
  }
}

TEST_CASE("JSON that Python refuses is refused") {
  for (const char* text :
       {"", "{", "{\"a\": nan}", "{\"a\": +1}", "{\"a\": .5}", "[1,]", "{\"a\": 1} x", "Infinit", "{'a': 1}",
        "[1e400x]", "[NaNN]", "{\"a\": \"\\ud8\"}", "[-]", "\"\\", "[\"\x01\"]", "{\"a\": \"\xff\"}"}) {
    CAPTURE(std::string(text));
    words_of(ErrorKind::corrupt, [&] { core::parse_tolerantly(text); });
  }
  CHECK(
      has(words_of(ErrorKind::corrupt, [&] { core::parse_tolerantly(std::string(300, '[') + std::string(300, ']')); }),
          "nesting is deeper than 256"));
}

namespace {

struct UpdateCase {
  std::string text;
  DType dtype = DType::bf16;
  std::string updated;  ///< empty: unchanged
};

std::vector<UpdateCase> update_cases() {
  const std::string odd = R"( "x" : [NaN,1e2 ,18446744073709551616] , "\ud800":-Infinity)";
  return {
      {"{" + odd + ", \"dtype\": \"bfloat16\"}\n", DType::bf16, ""},
      {"{" + odd + ",\t\"dtype\" :\"float32\" }", DType::bf16, "{" + odd + ",\t\"dtype\" :\"bfloat16\" }"},
      {R"({"torch_dtype": "float32", "a": {"dtype": "float32"}, "dtype": null})", DType::f16,
       R"({"torch_dtype": "float16", "a": {"dtype": "float32"}, "dtype": null})"},
      {R"({"text_config": {"dtype": "float32", "deep_config": {"torch_dtype": "float32"}}, "dtype": "float16"})",
       DType::f16,
       R"({"text_config": {"dtype": "float16", "deep_config": {"torch_dtype": "float16"}}, "dtype": "float16"})"},
      {R"({"dtype": "float32", "a": 1, "dtype": "float32"})", DType::f16,
       R"({"dtype": "float16", "a": 1, "dtype": "float16"})"},
      {R"({"quantization_config": {"dtype": "x", "b": [1, {"}": "\"}"}]}, "a": NaN})", DType::f32, R"({"a": NaN})"},
      {R"({"a": NaN, "quantization_config": null})", DType::f32, R"({"a": NaN})"},
      {R"({"a": 1, "quantization_config": 1, "b": 2, "quantization_config": 2})", DType::f32, R"({"a": 1, "b": 2})"},
      {R"({"quantization_config": 1, "quantization_config": 2})", DType::f32, R"({})"},
      {R"({ "quantization_config": {} })", DType::f32, R"({  })"},
      {R"({"a": {"quantization_config": {}}})", DType::f32, ""},
      {R"({"quantization_config": {}, "dtype": "float32"})", DType::f16, R"({"dtype": "float16"})"},
      {R"({})", DType::f16, ""},
  };
}

}  // namespace

TEST_CASE("an update of a config keeps all bytes outside of the changed members") {
  for (const UpdateCase& one : update_cases()) {
    CAPTURE(one.text);
    const std::vector<NamedSpec> model = {{"w", {one.dtype, {2, 2}}}};
    std::vector<std::string> notes;
    CHECK(updated_config(one.text, model, notes).value_or("") == one.updated);
    CHECK(notes.empty() == one.updated.empty());
  }
}

TEST_CASE("config.json and indices are read tolerantly") {
  const TemporaryDirectory folder(Medium::memory);
  write_text(folder / "config.json",
             R"({"model_type": "a", "model_type": "mamba2", "time_step_limit": [0.0, Infinity]})");
  write_text(folder / "model.safetensors.index.json",
             R"({"metadata": {"total_size": NaN}, "weight_map": {"w": "a.safetensors", "w": "b.safetensors"}})");
  CHECK(read_model_config(folder.path().string())->at("model_type").as_string() == "mamba2");
  const std::string header = R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"__metadata__":null})";
  const std::uint64_t length = header.size();
  write_text(folder / "b.safetensors",
             std::string(reinterpret_cast<const char*>(&length), sizeof length) + header + "x");
  CHECK(ModelDir::open(folder.path().string()).tensors().size() == 1);
}

TEST_CASE("a head that is not cut like the embeddings it is tied to is not compared with them") {
  const Config config = parse_json(R"({"tie_word_embeddings": true})");
  const auto arranged = [](const std::string& name, std::uint32_t index, const merge::Layout& layout) {
    return ArrangedTensor{name, name, nullptr, layout, {{0, index}, {1, index}}, {}, {}};
  };
  const std::vector<TensorSpec> halves(2, {DType::f32, {4, 3}});
  const std::vector<TensorSpec> wholes(2, {DType::f32, {8, 3}});
  const merge::Layout cut = merge::join(merge::Concat{0}, halves);
  const merge::Layout same = merge::join(merge::Same{}, wholes);
  for (const bool is_alike : {true, false}) {
    CAPTURE(is_alike);
    Arrangement arrangement;
    arrangement.tensors = {arranged("lm_head.weight", 0, cut),
                           arranged("model.embed_tokens.weight", 1, is_alike ? cut : same)};
    std::vector<std::string> notes;
    leave_out_tied_head(config, {}, arrangement, notes);
    CHECK(arrangement.tensors.size() == (is_alike ? 1 : 2));
    CHECK(arrangement.tensors.back().equal.size() == (is_alike ? 2 : 0));
    CHECK(notes.size() == (is_alike ? 0 : 1));
  }
}
