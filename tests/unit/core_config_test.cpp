// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cmath>
#include <functional>
#include <string>
#include <type_traits>

#include "doctest/doctest.h"
#include "muster/config.hpp"
#include "muster/error.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/random_config.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using test::words_of;

namespace {}  // namespace

TEST_CASE("members keep their order and are found, few or many, reserved or not") {
  for (const std::size_t reserved : {0U, 5U, 9U, 100U, 5000U}) {
    for (const int members : {0, 1, 8, 9, 17, 1000}) {
      CAPTURE(reserved);
      CAPTURE(members);
      ConfigObject object;
      object.reserve(reserved);
      for (int i = 0; i < members; ++i) CHECK(object.insert("key" + std::to_string(i), i));
      for (int i = 0; i < members; ++i) {
        CHECK(!object.insert("key" + std::to_string(i), -1));
        REQUIRE(object.find("key" + std::to_string(i)) != nullptr);
        CHECK(object.find("key" + std::to_string(i))->as_int() == i);
      }
      CHECK(object.find("key") == nullptr);
      CHECK(object.size() == static_cast<std::size_t>(members));
      int at = 0;
      for (const auto& [key, value] : object) CHECK(key == "key" + std::to_string(at++));
      const ConfigObject copy = object;
      CHECK(copy.size() == object.size());
      ConfigObject moved = std::move(object);
      object = ConfigObject();
      CHECK(object.find("key0") == nullptr);
      CHECK(moved.size() == copy.size());
      CHECK((moved.find("key0") != nullptr) == (members > 0));
      moved["new"] = 1;
      CHECK(moved.find("new")->as_int() == 1);
      CHECK(copy.find("new") == nullptr);
    }
  }
}

TEST_CASE("values know their type and refuse access as another") {
  const Config real = 1.5;
  CHECK(words_of(ErrorKind::invalid_argument, [&] { (void)real.as_string(); }) ==
        "config value: expected a string, found real");
  CHECK(!words_of(ErrorKind::invalid_argument, [&] { (void)real.as_bool(); }).empty());
  CHECK(!words_of(ErrorKind::invalid_argument, [&] { (void)real.as_int(); }).empty());
  CHECK(!words_of(ErrorKind::invalid_argument, [&] { (void)real.as_uint(); }).empty());
  CHECK(!words_of(ErrorKind::invalid_argument, [&] { (void)real.as_array(); }).empty());
  CHECK(!words_of(ErrorKind::invalid_argument, [&] { (void)real.as_object(); }).empty());
  CHECK(!words_of(ErrorKind::invalid_argument, [&] { (void)real.as_tensor(); }).empty());
  CHECK(!words_of(ErrorKind::invalid_argument, [&] { (void)real.at("x"); }).empty());
  CHECK(!words_of(ErrorKind::invalid_argument, [&] { (void)Config("x").as_double(); }).empty());
  CHECK(!words_of(ErrorKind::not_found, [] { (void)Config::object({}).at("x"); }).empty());
  CHECK(!words_of(ErrorKind::not_found, [] { (void)Config::array({1}).at(1U); }).empty());
  CHECK(!words_of(ErrorKind::invalid_argument, [] { Config::object({{"a", 1}, {"a", 2}}); }).empty());
}

TEST_CASE("integers are exact at both ends of 64 bits") {
  CHECK(Config(std::uint64_t{5}).type() == Config::Type::integer);
  CHECK(Config(std::uint64_t{5}) == Config(5));
  CHECK(Config(UINT64_MAX).as_uint() == UINT64_MAX);
  CHECK(!words_of(ErrorKind::invalid_argument, [] { (void)Config(UINT64_MAX).as_int(); }).empty());
  CHECK(!words_of(ErrorKind::invalid_argument, [] { (void)Config(-1).as_uint(); }).empty());
  CHECK(Config(INT64_MIN).as_int() == INT64_MIN);
  CHECK(Config(3).as_double() == 3.0);
}

TEST_CASE("a null becomes an object or a list on first use") {
  Config config;
  config["a"]["b"] = 1;
  config["list"].push_back("x");
  CHECK(config.at("a").at("b").as_int() == 1);
  CHECK(config.at("list").at(0U).as_string() == "x");
  CHECK(config.size() == 2);
  CHECK(Config(7).size() == 0);
}

TEST_CASE("equality is bit for bit, and ignores the order of members") {
  CHECK(Config(NAN) == Config(NAN));
  CHECK(!(Config(0.0) == Config(-0.0)));
  CHECK(
      !(Config(std::bit_cast<double>(0x7ff8000000000001ULL)) == Config(std::bit_cast<double>(0x7ff8000000000000ULL))));
  CHECK(!(Config(1) == Config(1.0)));
  CHECK(!(Config() == Config(false)));
  CHECK(Config::object({{"a", 1}, {"b", 2}}) == Config::object({{"b", 2}, {"a", 1}}));
  CHECK(!(Config::object({{"a", 1}}) == Config::object({{"b", 1}})));
  CHECK(!(Config::array({1, 2}) == Config::array({2, 1})));
  CHECK(!(Config::array() == Config::object()));
  CHECK(Config(test::pattern(DType::u4, {3}, 1)) == Config(test::pattern(DType::u4, {3}, 1)));
  CHECK(!(Config(test::pattern(DType::u4, {3}, 1)) == Config(test::pattern(DType::u4, {3}, 2))));
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    const Config tree = test::RandomConfig(seed).tree(5);
    CHECK(tree == test::RandomConfig(seed).tree(5));
    CHECK(!(Config::array({tree}) == tree));
  }
}

static_assert(!std::is_constructible_v<Config, void*> && !std::is_constructible_v<Config, const int*>,
              "a pointer is no boolean");
static_assert(!std::is_constructible_v<Config, char>, "a character is no number");

TEST_CASE("numbers of every C++ type become values, and are restored if they fit") {
  const Config config = Config::object({{"unsigned", 3U},
                                        {"long", 1LL},
                                        {"size", std::size_t{4}},
                                        {"byte", std::int8_t{-5}},
                                        {"largest", UINT64_MAX},
                                        {"half", 0.5F},
                                        {"yes", true},
                                        {"name", "x"}});
  CHECK(config.at("unsigned").type() == Config::Type::integer);
  CHECK(config.at("largest").type() == Config::Type::unsigned_integer);
  CHECK(config.at("yes").type() == Config::Type::boolean);
  CHECK(config.at("unsigned").as<int>() == 3);
  CHECK(config.at("size").as<std::uint8_t>() == 4);
  CHECK(config.at("largest").as<std::uint64_t>() == UINT64_MAX);
  CHECK(config.at("half").as<float>() == 0.5F);
  CHECK(config.at("name").as<std::string>() == "x");
  for (const auto& wrong : {std::function<void()>([&] { (void)config.at("byte").as<unsigned>(); }),
                            std::function<void()>([&] { (void)config.at("largest").as<std::int64_t>(); }),
                            std::function<void()>([&] { (void)config.at("name").as<int>(); }),
                            std::function<void()>([&] { (void)config.at("yes").as<int>(); })})
    CHECK_FALSE(words_of(ErrorKind::invalid_argument, wrong).empty());
  const char* const nothing = nullptr;
  CHECK_FALSE(words_of(ErrorKind::invalid_argument, [&] { (void)Config(nothing); }).empty());
}

TEST_CASE("members are looked up, with a default if they are missing, and removed") {
  for (const int members : {1, 8, 9, 1000}) {
    CAPTURE(members);
    Config config = Config::object();
    for (int i = 0; i < members; ++i) config["key" + std::to_string(i)] = i;
    CHECK(config.contains("key0"));
    CHECK(config.value_or("key0", 7) == 0);
    CHECK(config.value_or("other", 7) == 7);
    CHECK(config.value_or("other", "text") == "text");
    CHECK_FALSE(words_of(ErrorKind::invalid_argument, [&] { (void)config.value_or("key0", "text"); }).empty());
    CHECK(config.erase("key0"));
    CHECK_FALSE(config.erase("key0"));
    CHECK_FALSE(config.contains("key0"));
    CHECK(config.size() == static_cast<std::size_t>(members - 1));
    for (int i = 1; i < members; ++i) CHECK(config.at("key" + std::to_string(i)).as_int() == i);
    config["key0"] = "again";
    CHECK(config.at("key0").as_string() == "again");
  }
  CHECK_FALSE(Config(1).contains("key"));
  CHECK_FALSE(words_of(ErrorKind::invalid_argument, [] { (void)Config(1).value_or("key", 2); }).empty());
}

TEST_CASE("leaves are visited in order, and replaced one by one") {
  const Config config = Config::object({{"a", Config::array({1, Config::array(), "x"})}, {"b", Config::object()}});
  std::string seen;
  for_each_leaf(config, [&](const Config& leaf) { seen += to_string(leaf.type()); });
  CHECK(seen == "integerstring");
  CHECK(map_leaves(config, [](const Config& leaf) { return leaf; }) == config);
  CHECK(map_leaves(config, [](const Config&) { return Config(); }).at("a").at(0).is_null());
  Config deep;
  for (int i = 0; i <= max_config_depth; ++i) deep = Config::array({deep});
  CHECK_FALSE(words_of(ErrorKind::invalid_argument, [&] { for_each_leaf(deep, [](const Config&) {}); }).empty());
}

TEST_CASE("value_or() takes a member or text of any kind; bits of a vector are booleans") {
  using namespace std::string_view_literals;
  const Config config = Config::object({{"there", "here"}});
  const char name[] = "else";
  CHECK(config.value_or("there", "no") == "here");
  CHECK(config.value_or("k", name) == "else");
  CHECK(config.value_or("k", "view"sv) == "view");
  const char* nothing = nullptr;
  CHECK_THROWS_AS((void)config.value_or("k", nothing), Error);
  std::vector<bool> flags{true, false};
  CHECK(Config(flags[0]).as_bool());
  CHECK(!Config(flags[1]).as_bool());
}
