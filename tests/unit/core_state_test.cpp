// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "doctest/doctest.h"
#include "muster/error.hpp"
#include "muster/json.hpp"
#include "muster/state.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/random_config.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using test::small;

namespace {

std::string defect_of(std::string_view text) {
  return test::words_of(ErrorKind::corrupt, [&] { parse_json(text); });
}

/// `depth` arrays around a value.
Config nested(Config value, int depth) {
  for (; depth > 0; --depth) {
    ConfigArray around;
    around.push_back(std::move(value));
    value = std::move(around);
  }
  return value;
}

std::vector<std::string> names(const State& state) {
  std::vector<std::string> all;
  for (const auto& [name, tensor] : state.weights) all.push_back(name);
  return all;
}

}  // namespace

TEST_CASE("weights are named by their paths, and equal spellings are distinguished") {
  const Config config = Config::object({{"layers", Config::array({Config::object({{"weight", small()}}), 1, small()})},
                                        {"a.b", small()},
                                        {"a", Config::object({{"b", small(2)}, {"b#2", small(3)}})},
                                        {"a.b#2", small(4)},
                                        {"", small()}});
  const State state = split(config);
  CHECK(names(state) ==
        std::vector<std::string>{"layers.0.weight", "layers.2", "a.b", "a.b#2", "a.b#2#2", "a.b#2#3", "tensor"});
  CHECK(join(state) == config);
  CHECK(state.weights[0].second.data() == config.at("layers").at(0U).at("weight").as_tensor().data());
}

TEST_CASE("many paths with one spelling are not slower than others") {
  constexpr std::size_t dots = 2000;
  Config config;
  for (std::size_t i = 0; i < dots; ++i)
    config[std::string(i, '.')] = Config::object({{std::string(dots - 1 - i, '.'), small(i)}});
  const State state = split(config);
  CHECK(state.weights.back().first == std::string(dots, '.') + "#2000");
  CHECK(join(state) == config);
}

TEST_CASE("a string that equals a tensor's key") {
  const Config config = Config::object({{"w", small()},
                                        {"name", "w"},
                                        {"reference", Config::object({{"$tensor", "w"}})},
                                        {"escaped", Config::object({{"$$tensor", "w"}})},
                                        {"float", Config::object({{"$float", "nan"}})}});
  State state = split(config);
  CHECK(state.weights.size() == 1);
  CHECK(join(state) == config);
  state.config = parse_json(to_json(state.config));
  CHECK(join(state) == config);
}

TEST_CASE("a config of 40 and more small tensors") {
  Config config;
  for (int i = 0; i < 300; ++i)
    config["w" + std::to_string(i)] = test::pattern(DType::f32, {1}, static_cast<unsigned>(i));
  const State state = split(config);
  CHECK(state.weights.size() == 300);
  CHECK(join(state) == config);
}

TEST_CASE("a config with no tensor") {
  const Config config = Config::object({{"hidden_size", 64}, {"empty", Config::object()}, {"list", Config::array()}});
  const State state = split(config);
  CHECK(state.weights.empty());
  CHECK(state.config == config);
  CHECK(join(state) == config);
}

TEST_CASE("a config that is one tensor") {
  const State state = split(small());
  CHECK(names(state) == std::vector<std::string>{"tensor"});
  CHECK(join(state) == Config(small()));
}

TEST_CASE("every dtype is restored by split and join") {
  for (const DType dtype : all_dtypes()) {
    const Config config = Config::object({{"w", test::pattern(dtype, {3, 5}, 1)}});
    CHECK(join(split(config)) == config);
  }
}

TEST_CASE("random trees: split, JSON and join give them back") {
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    CAPTURE(seed);
    const Config config = test::RandomConfig(seed).tree(5);
    State state = split(config);
    REQUIRE(join(state) == config);
    state.config = parse_json(to_json(state.config, static_cast<int>(seed % 4) - 1));
    REQUIRE(join(state) == config);
  }
}

TEST_CASE("states that contradict themselves are refused") {
  const auto check_refused = [](const State& state) { test::words_of(ErrorKind::corrupt, [&] { join(state); }); };
  const Config reference = Config::object({{"$tensor", "w"}});
  check_refused({reference, {}});
  check_refused({Config::array({reference, reference}), {{"w", small()}}});
  check_refused({Config::object({{"$tensor", 5}}), {{"w", small()}}});
  check_refused({reference, {{"w", small()}, {"w", small()}}});
  check_refused({reference, {{"w", small()}, {"v", small()}}});
  check_refused({small(), {}});
  CHECK(join({reference, {{"w", small()}}}) == Config(small()));
}

TEST_CASE("text that is not UTF-8 is refused when it is written") {
  for (const char* text : {"\xff", "a\xc3", "\xed\xa0\x80", "\xc0\x80", "\xf4\x90\x80\x80", "12345678\x80"}) {
    const Config value = text;
    const Config key = Config::object({{text, 1}});
    for (const Config& config : {value, key}) {
      test::words_of(ErrorKind::invalid_argument, [&] { split(config); });
      test::words_of(ErrorKind::invalid_argument, [&] { to_json(config); });
    }
  }
}

TEST_CASE("nesting up to the limit passes every function, and beyond it none") {
  for (const Config& leaf : {Config(1), Config(small()), Config(NAN), Config("x"), Config::array()}) {
    const Config deepest = nested(leaf, max_config_depth);
    State state = split(deepest);
    state.config = parse_json(to_json(state.config));
    CHECK(join(state) == deepest);
    test::words_of(ErrorKind::invalid_argument, [&] { split(nested(deepest, 1)); });
  }
  test::words_of(ErrorKind::invalid_argument, [] { to_json(nested(1, max_config_depth + 1)); });
  test::words_of(ErrorKind::corrupt, [] { join({nested(1, max_config_depth + 1), {}}); });
  defect_of(std::string(max_config_depth + 1, '[') + "1");
  defect_of(std::string(1000000, '['));
  CHECK_NOTHROW(parse_json(std::string(max_config_depth, '[') + "1" + std::string(max_config_depth, ']')));
}

TEST_CASE("the JSON text that is written") {
  const Config config = Config::object({{"b", Config::array({1, -2.0, 1e300, -0.0, UINT64_MAX, INT64_MIN})},
                                        {"a", Config::object({{"none", {}}, {"yes", true}})},
                                        {"text", "\x01\x1f\"\\/\b\f\n\r\t\x7f\xc3\xa9"},
                                        {"empty", Config::array({Config::array(), Config::object()})}});
  CHECK(to_json(config) ==
        R"({"b":[1,-2.0,1e+300,-0.0,18446744073709551615,-9223372036854775808],"a":{"none":null,"yes":true},)"
        R"("text":"\u0001\u001f\"\\/\b\f\n\r\t)"
        "\x7f\xc3\xa9\","
        R"("empty":[[],{}]})");
  CHECK(to_json(Config::object({{"a", Config::array({1, 2})}, {"b", Config::object()}}), 2) ==
        "{\n  \"a\": [\n    1,\n    2\n  ],\n  \"b\": {}\n}");
  CHECK(to_json(Config::array({NAN, INFINITY, -INFINITY, std::bit_cast<double>(0xfff8000000000001ULL)})) ==
        R"([{"$float":"nan"},{"$float":"inf"},{"$float":"-inf"},{"$float":"0xfff8000000000001"}])");
  CHECK(parse_json(to_json(config)) == config);
  test::words_of(ErrorKind::invalid_argument, [] { to_json(small()); });
}

TEST_CASE("JSON texts with defects are refused with line and column") {
  CHECK(defect_of("{\"a\": 1,\n \"b\": {\"a\": 1}, \"a\": 2}") ==
        "JSON line 2, column 19: the key \"a\" is duplicated");
  CHECK(defect_of("[1] x").starts_with("JSON line 1, column 5: "));
  CHECK(defect_of("[1,\n\n nul]").starts_with("JSON line 3, column 5: "));
  CHECK(defect_of("").starts_with("JSON line 1, column 1: "));
  CHECK(defect_of("[\"\xff\"]").starts_with("JSON line 1, column 3: "));
  for (const char* text : {"[1,]",
                           "{\"a\"}",
                           "{a: 1}",
                           "[01]",
                           "[1",
                           "'x'",
                           "NaN",
                           "[Infinity]",
                           "\"\\ud800\"",
                           "\"\n\"",
                           "// x\n1",
                           "1e999",
                           "18446744073709551616",
                           "-9223372036854775809",
                           "\"\\x\"",
                           "[\"\xed\xa0\x80\"]",
                           R"({"$float": 1})",
                           R"({"$float": "0x12"})",
                           R"({"$float": "0x7ff800000000000g"})",
                           R"({"$float": "NaN"})"}) {
    CAPTURE(text);
    CHECK(defect_of(text).starts_with("JSON line "));
  }
  const std::string words = defect_of("[\"" + std::string(100000, 'x'));
  CHECK(words.size() < 300);
}

TEST_CASE("JSON texts of other programs") {
  CHECK(parse_json("\xef\xbb\xbf{\"a\": 1e2, \"b\": \"\\u00e9\\ud83d\\ude00\"}") ==
        Config::object({{"a", 100.0}, {"b", "\xc3\xa9\xf0\x9f\x98\x80"}}));
  CHECK(parse_json(" \t\r\n-0 ") == Config(0));
  CHECK(parse_json("-0.0") == Config(-0.0));
  CHECK(parse_json(R"({"$float": "nan", "more": 1})").size() == 2);
}

TEST_CASE("nlohmann's json and back") {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    CAPTURE(seed);
    const Config config = test::RandomConfig(seed, false).tree(5);
    CHECK(from_nlohmann(to_nlohmann(config)) == config);
    CHECK(from_nlohmann(to_nlohmann<nlohmann::json>(config)) == config);
  }
  CHECK(to_nlohmann(Config::object({{"z", 1}, {"a", 2}})).dump() == R"({"z":1,"a":2})");
  test::words_of(ErrorKind::invalid_argument, [] { to_nlohmann(Config(small())); });
  test::words_of(ErrorKind::invalid_argument, [] { from_nlohmann(nlohmann::json::binary({1})); });
  test::words_of(ErrorKind::invalid_argument, [] { to_nlohmann(nested(1, max_config_depth + 1)); });
}

TEST_CASE("text after a NUL byte is not ignored") {
  CHECK_THROWS_AS((void)parse_json(std::string_view("{}\0x", 4)), Error);
  CHECK_THROWS_AS((void)parse_json(std::string_view("{}\0", 3)), Error);
}
