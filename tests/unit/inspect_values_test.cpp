// SPDX-License-Identifier: Apache-2.0
// Elements, statistics, slices and their text, each compared with a slow and obvious implementation.

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "src/checkpoint/source.hpp"
#include "src/inspect/elements.hpp"
#include "src/inspect/show.hpp"
#include "src/inspect/statistics.hpp"
#include "tests/support/memory_source.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::inspect;

namespace {

std::vector<std::byte> random_bytes(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

template <class T>
std::vector<std::byte> raw_bytes(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

TensorStatistics of(DType dtype, Shape shape, std::vector<std::byte> bytes, std::size_t bins = 7) {
  test::MemorySource source;
  source.add("t", dtype, std::move(shape), std::move(bytes));
  return statistics(source, {0}, bins).front();
}

std::string printed(const test::MemorySource& source, const std::string& what, CatOptions options = {}) {
  std::string out;
  const Source opened{.path = "memory", .tensors = std::make_shared<test::MemorySource>(source)};
  cat(opened, what, options, [&](std::string_view text) { out += text; });
  return out;
}

std::string words_of_failure(const std::string& slice, const Shape& shape) {
  return test::words_of(ErrorKind::invalid_argument, [&] { parse_selection(slice, shape); });
}

}  // namespace

TEST_CASE("statistics of every dtype equal those of its values one by one") {
  for (const DType dtype : all_dtypes()) {
    CAPTURE(to_string(dtype));
    // A few values are sorted, and many are counted (8 bits in pairs). Some sizes cross the border of a piece.
    for (const std::int64_t elements : {1, 5, 1001, 50'001, 9'000'001}) {
      if (elements > 1'000'000 && dtype != DType::bf16 && dtype != DType::f32 && dtype != DType::i4 &&
          dtype != DType::f6_e2m3)
        continue;
      std::vector<std::byte> bytes = random_bytes(byte_size(dtype, {elements}), static_cast<std::uint32_t>(elements));
      if (dtype == DType::boolean)
        for (std::byte& byte : bytes) byte &= std::byte{1};
      const TensorStatistics found = of(dtype, {elements}, bytes);
      const std::uint64_t values = static_cast<std::uint64_t>(elements) * values_per_element(dtype);
      std::uint64_t nans = 0;
      std::uint64_t infinities = 0;
      std::uint64_t zeros = 0;
      long double sum = 0;
      std::vector<double> finite;
      for (std::uint64_t i = 0; i < values; ++i) {
        const double value = value_of(dtype, value_bits(dtype, bytes, i));
        nans += std::isnan(value) ? 1 : 0;
        infinities += std::isinf(value) ? 1 : 0;
        zeros += value == 0 ? 1 : 0;
        if (std::isfinite(value)) finite.push_back(value);
      }
      REQUIRE(found.values == values);
      CHECK(found.nans == nans);
      CHECK(found.infinities == infinities);
      CHECK(found.zeros == zeros);
      if (finite.empty()) {
        CHECK(found.minimum.is_null());
        continue;
      }
      for (const double value : finite) sum += value;
      const long double mean = sum / static_cast<long double>(finite.size());
      long double squares = 0;
      for (const double value : finite) squares += (value - mean) * (value - mean);
      const auto deviation = static_cast<double>(std::sqrt(squares / static_cast<long double>(finite.size())));
      const auto [low, high] = std::minmax_element(finite.begin(), finite.end());
      const auto number = [](const Config& config) {
        return config.type() == Config::Type::boolean ? (config.as_bool() ? 1.0 : 0.0) : config.as_double();
      };
      CHECK(number(found.minimum) == *low);
      CHECK(number(found.maximum) == *high);
      const double scale = std::max(std::abs(*low), std::abs(*high));
      if (std::isfinite(scale) && dtype != DType::f64)
        CHECK(std::abs(found.mean - static_cast<double>(mean)) <= scale * 1e-9);
      if (std::isfinite(deviation)) CHECK(found.deviation == doctest::Approx(deviation).epsilon(1e-9));
      CHECK(std::accumulate(found.histogram.counts.begin(), found.histogram.counts.end(), std::uint64_t{0}) ==
            finite.size());
    }
  }
}

TEST_CASE("bins are equally wide, integers are exact, and an empty range has one bin") {
  const TensorStatistics even = of(DType::f32, {8}, raw_bytes<float>({0, 1, 2, 3, 4, 5, 6, 7}), 4);
  CHECK(even.histogram.counts == std::vector<std::uint64_t>{2, 2, 2, 2});
  CHECK(even.histogram.low == 0);
  CHECK(even.histogram.high == 7);
  const TensorStatistics narrow = of(DType::u8, {4}, raw_bytes<std::uint8_t>({0, 85, 170, 255}), 3);
  CHECK(narrow.histogram.counts == std::vector<std::uint64_t>{1, 1, 2});
  constexpr std::int64_t large = std::numeric_limits<std::int64_t>::max();
  const TensorStatistics exact = of(DType::i64, {2}, raw_bytes<std::int64_t>({large, large - 1}));
  CHECK(exact.minimum.as_int() == large - 1);
  CHECK(exact.maximum.as_int() == large);
  CHECK(exact.histogram.counts.front() == 1);
  CHECK(exact.histogram.counts.back() == 1);
  const TensorStatistics wide = of(DType::f64, {2}, raw_bytes<double>({-1.7e308, 1.7e308}), 2);
  CHECK(wide.mean == 0);
  CHECK(wide.histogram.counts == std::vector<std::uint64_t>{1, 1});
  CHECK(of(DType::f32, {3}, raw_bytes<float>({2, 2, 2})).histogram.counts == std::vector<std::uint64_t>{3});
  const TensorStatistics none = of(DType::f32, {1}, raw_bytes<float>({std::nanf("")}));
  CHECK(none.histogram.counts.empty());
  CHECK(none.minimum.is_null());
  CHECK(of(DType::f32, {0}, {}).values == 0);
  // The unused half of the last byte does not count.
  CHECK(of(DType::u4, {3}, raw_bytes<std::uint8_t>({0x21, 0xf3})).maximum.as_uint() == 3);
}

TEST_CASE("every code of the small floats has the value of its definition") {
  // Sign, exponent and mantissa. FNUZ formats have no infinity, and the code of minus zero is the only NaN.
  const auto defined = [](unsigned word, int exponent_bits, int mantissa_bits, int bias) {
    const unsigned mantissa = word % (1U << mantissa_bits);
    const int exponent = static_cast<int>(word >> mantissa_bits) % (1 << exponent_bits);
    const double part = std::ldexp(mantissa, -mantissa_bits);
    const double size = exponent == 0 ? std::ldexp(part, 1 - bias) : std::ldexp(1 + part, exponent - bias);
    return (word >> (exponent_bits + mantissa_bits)) % 2 == 0 ? size : -size;
  };
  struct Format {
    DType dtype;
    int exponent_bits, mantissa_bits, bias;
    bool is_fnuz;
    double largest, smallest;
  };
  for (const Format& format :
       {Format{DType::f8_e4m3fnuz, 4, 3, 8, true, 240, std::ldexp(1, -10)},
        Format{DType::f8_e5m2fnuz, 5, 2, 16, true, 57344, std::ldexp(1, -17)},
        Format{DType::f6_e2m3, 2, 3, 1, false, 7.5, 0.125}, Format{DType::f6_e3m2, 3, 2, 3, false, 28, 0.0625}}) {
    CAPTURE(to_string(format.dtype));
    double largest = 0;
    double smallest = 1;
    for (unsigned word = 0; word < 1U << bits(format.dtype); ++word) {
      CAPTURE(word);
      const double value = value_of(format.dtype, word);
      if (format.is_fnuz && word == 0x80) {
        CHECK(std::isnan(value));
        CHECK(value_text(format.dtype, word) == "nan");
        continue;
      }
      const double wanted = defined(word, format.exponent_bits, format.mantissa_bits, format.bias);
      CHECK(value == wanted);
      CHECK(std::signbit(value) == std::signbit(wanted));
      largest = std::max(largest, value);
      if (value > 0) smallest = std::min(smallest, value);
    }
    CHECK(largest == format.largest);
    CHECK(smallest == format.smallest);
  }
}

TEST_CASE("packed elements are read from every bit offset, and across the borders of a read") {
  for (const DType dtype : {DType::f6_e2m3, DType::f6_e3m2, DType::u4}) {
    CAPTURE(to_string(dtype));
    const auto size = static_cast<std::size_t>(bits(dtype));
    const std::int64_t elements = 200'003;
    const std::vector<std::byte> bytes = random_bytes(byte_size(dtype, {elements}), 5);
    const auto word = [&](std::size_t element) {
      unsigned out = 0;
      for (std::size_t bit = 0; bit < size; ++bit) {
        const std::size_t at = element * size + bit;
        out |= (std::to_integer<unsigned>(bytes[at / 8]) >> (at % 8) & 1U) << bit;
      }
      return out;
    };
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < static_cast<std::size_t>(elements); ++i)
      wrong += value_bits(dtype, bytes, i) == word(i) ? 0 : 1;
    CHECK(wrong == 0);
    test::MemorySource source;
    source.add("t", dtype, {elements}, bytes);
    // Around the read windows of cat, which have 48 KiB, and at the last one.
    for (const std::size_t first :
         {std::size_t{0}, 49'152 * 8 / size - 3, 2 * 49'152 * 8 / size - 2, std::size_t{199'996}})
      for (std::size_t step : {std::size_t{1}, std::size_t{3}}) {
        if (first + 2 * step >= static_cast<std::size_t>(elements)) continue;
        const std::string range = fmt::format("t[{}:{}:{}]", first, first + 2 * step + 1, step);
        CAPTURE(range);
        const std::string json = printed(source, range, {.format = CatFormat::json});
        const Config values = parse_json(json).at("values");
        std::vector<std::byte> packed((3 * size + 7) / 8);
        for (std::size_t i = 0; i < 3; ++i) {
          const unsigned code = word(first + i * step);
          CHECK(values.at(i).as_double() == std::stod(value_text(dtype, code)));
          for (std::size_t bit = 0; bit < size; ++bit)
            packed[(i * size + bit) / 8] |= static_cast<std::byte>((code >> bit & 1U) << ((i * size + bit) % 8));
        }
        CHECK(printed(source, range, {.format = CatFormat::raw}) ==
              std::string(reinterpret_cast<const char*>(packed.data()), packed.size()));
      }
  }
  // Bits that no element uses belong to the tensor, so a difference in them counts.
  for (const std::uint8_t last : {std::uint8_t{0x10}, std::uint8_t{0x80}})
    CHECK(
        compare_values(DType::f6_e2m3, raw_bytes<std::uint8_t>({0, 0}), raw_bytes<std::uint8_t>({0, last})).elements ==
        1);
  CHECK(compare_values(DType::f6_e2m3, raw_bytes<std::uint8_t>({0}), raw_bytes<std::uint8_t>({0x40})).elements == 1);
}

TEST_CASE("a value's text reads back as the value, and no shorter text does") {
  for (const DType dtype : all_dtypes()) {
    if (is_integer(dtype) || bits(dtype) > 16) continue;
    CAPTURE(to_string(dtype));
    std::vector<double> values;
    for (std::uint32_t word = 0; word < (1U << bits(dtype)); ++word) values.push_back(value_of(dtype, word));
    std::vector<double> sorted;
    for (const double value : values)
      if (std::isfinite(value)) sorted.push_back(value);
    std::sort(sorted.begin(), sorted.end());
    const auto nearest = [&](double decimal) {
      const auto after = std::lower_bound(sorted.begin(), sorted.end(), decimal);
      if (after == sorted.end()) return sorted.back();
      if (after == sorted.begin()) return *after;
      return decimal - *(after - 1) < *after - decimal ? *(after - 1) : *after;
    };
    std::size_t wrong = 0;
    for (std::uint32_t word = 0; word < values.size(); ++word)
      if (std::isfinite(values[word])) wrong += nearest(std::stod(value_text(dtype, word))) == values[word] ? 0 : 1;
    CHECK(wrong == 0);
  }
  CHECK(value_text(DType::f16, 0x2e66) == "0.1");
  CHECK(value_text(DType::bf16, 0x3f80) == "1");
  CHECK(value_text(DType::f32, 0x3dcccccd) == "0.1");
  CHECK(value_text(DType::f32, 0x80000000) == "-0");
  CHECK(value_text(DType::boolean, 1) == "True");
  CHECK(value_text(DType::i4, 15) == "-1");
  CHECK(value_text(DType::u64, ~std::uint64_t{0}) == "18446744073709551615");
}

TEST_CASE("slices are those of NumPy") {
  const auto ranges = [](const std::string& text, std::int64_t extent) {
    const SelectedRange range = parse_selection(text, {extent}).ranges.front();
    std::vector<std::int64_t> out;
    for (std::int64_t i = 0; i < range.count; ++i) out.push_back(range.begin + i * range.step);
    return out;
  };
  using Indices = std::vector<std::int64_t>;
  CHECK(ranges("", 3) == Indices{0, 1, 2});
  CHECK(ranges("1:", 3) == Indices{1, 2});
  CHECK(ranges(":-1", 3) == Indices{0, 1});
  CHECK(ranges("::2", 5) == Indices{0, 2, 4});
  CHECK(ranges("::-1", 3) == Indices{2, 1, 0});
  CHECK(ranges("-2:-10:-2", 5) == Indices{3, 1});
  CHECK(ranges("10:20", 5).empty());
  CHECK(ranges("3:1", 5).empty());
  CHECK(ranges(" -1 ", 5) == Indices{4});
  CHECK(ranges("::9223372036854775807", 5) == Indices{0});
  CHECK(ranges("::-9223372036854775808", 5) == Indices{4});
  CHECK(ranges("-9223372036854775808:9223372036854775807", 2) == Indices{0, 1});
  CHECK(parse_selection("..., 0", {2, 3, 4}).shape() == Shape{2, 3});
  CHECK(parse_selection("0, ...", {2, 3, 4}).shape() == Shape{3, 4});
  CHECK(parse_selection("0,1,2", {2, 3, 4}).shape() == Shape{});
  CHECK(parse_selection("...", {}).shape() == Shape{});
  CHECK(parse_selection("0,", {2, 3}).shape() == Shape{3});
  CHECK(parse_selection(":", {2, 3}).is_whole({2, 3}));
  CHECK_FALSE(parse_selection(":1", {2, 3}).is_whole({2, 3}));
  CHECK(test::has(words_of_failure("5", {5}), "valid: -5 to 4"));
  CHECK(test::has(words_of_failure("-6", {5}), "valid: -5 to 4"));
  CHECK(test::has(words_of_failure("0", {0}), "has no elements"));
  CHECK(test::has(words_of_failure("a", {5}), "not an integer"));
  CHECK(test::has(words_of_failure("1:2:0", {5}), "must not be 0"));
  CHECK(test::has(words_of_failure("1:2:3:4", {5}), "BEGIN:END:STEP"));
  CHECK(test::has(words_of_failure("0,0", {5}), "too many indices (2) for the 1 dimension"));
  CHECK(test::has(words_of_failure("...,...", {5}), "once"));
  CHECK(test::has(words_of_failure("1,,2", {5, 5, 5}), "missing"));
  CHECK(test::has(words_of_failure("99999999999999999999", {5}), "not an integer"));
}

TEST_CASE("arrays are printed like those of NumPy") {
  test::MemorySource source;
  source.add("m", DType::f32, {2, 3}, raw_bytes<float>({1, 2.5F, -3, 0.125F, 0, 10}));
  source.add("small", DType::f32, {3}, raw_bytes<float>({1e-5F, 1.5F, -2}));
  source.add("long", DType::f64, {3}, raw_bytes<double>({12500000000, 0.25, -2}));
  source.add("n", DType::i32, {3}, raw_bytes<std::int32_t>({1, -20, 300}));
  source.add("b", DType::boolean, {2}, raw_bytes<std::uint8_t>({1, 0}));
  source.add("odd", DType::f32, {3}, raw_bytes<float>({std::nanf(""), -std::numeric_limits<float>::infinity(), 1}));
  source.add("c", DType::complex64, {2}, raw_bytes<float>({1, -2, 0.5F, 3}));
  source.add("cube", DType::u8, {2, 2, 2}, raw_bytes<std::uint8_t>({0, 1, 2, 3, 4, 5, 6, 7}));
  source.add("w[0]", DType::u8, {1}, raw_bytes<std::uint8_t>({9}));
  source.add("scalar", DType::f32, {}, raw_bytes<float>({0.25F}));
  source.add("empty", DType::f32, {0, 3}, {});
  source.add("q", DType::u4, {5}, raw_bytes<std::uint8_t>({0x21, 0x43, 0x05}));
  CHECK(printed(source, "m") == "m: F32 [2, 3]\n[[ 1.     2.5   -3.   ]\n [ 0.125  0.    10.   ]]\n");
  CHECK(printed(source, "m[::-1, 1]") == "m[::-1, 1]: F32 [2]\n[0.  2.5]\n");
  CHECK(printed(source, "small") == "small: F32 [3]\n[ 1.0e-05  1.5e+00 -2.0e+00]\n");
  CHECK(printed(source, "long") == "long: F64 [3]\n[ 1.25e+10  2.50e-01 -2.00e+00]\n");
  CHECK(printed(source, "n") == "n: I32 [3]\n[  1 -20 300]\n");
  CHECK(printed(source, "b") == "b: BOOL [2]\n[ True False]\n");
  CHECK(printed(source, "odd") == "odd: F32 [3]\n[ nan -inf   1.]\n");
  CHECK(printed(source, "c") == "c: C64 [2]\n[1. -2.j 0.5+3.j]\n");
  CHECK(printed(source, "cube") == "cube: U8 [2, 2, 2]\n[[[0 1]\n  [2 3]]\n\n [[4 5]\n  [6 7]]]\n");
  CHECK(printed(source, "w[0]") == "w[0]: U8 [1]\n[9]\n");
  CHECK(printed(source, "scalar") == "scalar: F32 []\n0.25\n");
  CHECK(printed(source, "empty") == "empty: F32 [0, 3]\n[]\n");
  CHECK(printed(source, "q[::2]", {.format = CatFormat::raw}) == std::string("\x31\x05", 2));
  CHECK(printed(source, "cube[:, 1]", {.format = CatFormat::raw}) == std::string("\x02\x03\x06\x07", 4));
  CHECK(printed(source, "odd", {.format = CatFormat::json}) ==
        "{\"name\":\"odd\",\"dtype\":\"F32\",\"shape\":[3],\"slice\":null,\"values\":[\"nan\",\"-inf\",1]}\n");
  CHECK_THROWS_WITH_AS(printed(source, "mm"), doctest::Contains("did you mean \"m\"?"), Error);
  CHECK_THROWS_WITH_AS(printed({}, "m"), doctest::Contains("It has no tensors."), Error);
}

TEST_CASE("long arrays are printed without their middle, and only their ends are read") {
  test::MemorySource source;
  std::vector<std::uint16_t> values(std::size_t{200} * 300);
  std::iota(values.begin(), values.end(), std::uint16_t{0});
  source.add("t", DType::u16, {200, 300}, raw_bytes(values));
  const std::string text = printed(source, "t");
  CHECK(text.find("[[    0     1     2 ...   297   298   299]") != std::string::npos);
  CHECK(text.find("\n ...\n") != std::string::npos);
  CHECK(text.ends_with("[59700 59701 59702 ... 59997 59998 59999]]\n"));
  CHECK(printed(source, "t", {.is_full = true}).find("...") == std::string::npos);
}
