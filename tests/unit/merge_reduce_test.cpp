// SPDX-License-Identifier: Apache-2.0
// Tests max, min, sum, product and average against a slow model that implements the formats by their definition: every
// pair of 8-bit values, every 16-bit value beside selected ones, unaligned memory, any number of sources.

#include "src/merge/half_sums.hpp"
#include "src/merge/reduce.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "doctest/doctest.h"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::merge;

namespace {

struct Format {
  int exponent;
  int mantissa;
  bool finite;
};

Format format_of(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return {5, 10, false};
    case DType::bf16:
      return {8, 7, false};
    case DType::f8_e4m3fn:
      return {4, 3, true};
    default:
      return {5, 2, false};
  }
}

double decode(DType dtype, std::uint32_t bits) {
  const Format format = format_of(dtype);
  const int bias = (1 << (format.exponent - 1)) - 1;
  const std::uint32_t mantissa = bits & ((1U << format.mantissa) - 1);
  const auto exponent = static_cast<int>((bits >> format.mantissa) & ((1U << format.exponent) - 1));
  const double sign = (bits >> (format.exponent + format.mantissa)) != 0 ? -1 : 1;
  const int largest = (1 << format.exponent) - 1;
  if (exponent == largest && !format.finite)
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity() : std::nan("");
  if (exponent == largest && mantissa == (1U << format.mantissa) - 1) return std::nan("");
  const double fraction = std::ldexp(static_cast<double>(mantissa), -format.mantissa);
  return sign * (exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias));
}

/// All values of a format, in order, so that rounding is a search.
class Numbers {
 public:
  explicit Numbers(DType dtype) : dtype_(dtype) {
    const Format format = format_of(dtype);
    const std::uint32_t count = 1U << (format.exponent + format.mantissa);
    for (std::uint32_t bits = 0; bits < count; ++bits) {
      const double value = decode(dtype, bits);
      if (std::isfinite(value)) finite_.push_back(value);
    }
    // The next number if the format had one. Overflow begins half-way to it.
    beyond_ = finite_.back() + (finite_.back() - finite_[finite_.size() - 2]);
  }

  /// Returns whether `bits` is the nearest number, with ties to even. NaN has many encodings, all of which are right.
  [[nodiscard]] bool is_rounded(float exact, std::uint32_t bits) const {
    const double got = decode(dtype_, bits);
    if (std::isnan(exact)) return std::isnan(got);
    const double size = std::fabs(static_cast<double>(exact));
    const bool is_negative = std::signbit(exact);
    const bool has_sign = (bits >> (format_of(dtype_).exponent + format_of(dtype_).mantissa)) != 0;
    const double limit = (finite_.back() + beyond_) / 2;
    const bool last_is_odd = (finite_.size() - 1) % 2 != 0;
    if (size > limit || (size == limit && last_is_odd))
      return format_of(dtype_).finite ? std::isnan(got) : (std::isinf(got) && is_negative == has_sign);
    const auto above = std::lower_bound(finite_.begin(), finite_.end(), size);
    std::size_t best = above == finite_.end() ? finite_.size() - 1 : static_cast<std::size_t>(above - finite_.begin());
    if (best > 0 && above != finite_.end()) {
      const double up = finite_[best] - size;
      const double down = size - finite_[best - 1];
      if (down < up || (down == up && best % 2 != 0)) --best;
    }
    return std::fabs(got) == finite_[best] && is_negative == has_sign;
  }

 private:
  DType dtype_;
  std::vector<double> finite_;
  double beyond_;
};

template <class Bits>
std::vector<Bits> reduced(Combine combine, DType dtype, const std::vector<std::vector<Bits>>& sources) {
  std::vector<const std::byte*> pointers;
  for (const auto& source : sources) pointers.push_back(reinterpret_cast<const std::byte*>(source.data()));
  std::vector<Bits> target(sources.front().size());
  reduce(combine, dtype, std::as_writable_bytes(std::span(target)), pointers);
  return target;
}

template <class Bits>
void check_pairs(DType dtype, const std::vector<Bits>& a, const std::vector<Bits>& b) {
  const Numbers numbers(dtype);
  const std::vector<Bits> sums = reduced<Bits>(Combine::sum, dtype, {a, b});
  const std::vector<Bits> products = reduced<Bits>(Combine::product, dtype, {a, b});
  const std::vector<Bits> averages = reduced<Bits>(Combine::average, dtype, {a, b});
  const std::vector<Bits> largest = reduced<Bits>(Combine::max, dtype, {a, b});
  const std::vector<Bits> smallest = reduced<Bits>(Combine::min, dtype, {a, b});
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double x = decode(dtype, a[i]);
    const double y = decode(dtype, b[i]);
    const float sum = static_cast<float>(x) + static_cast<float>(y);
    if (!numbers.is_rounded(sum, sums[i])) ++wrong;
    if (!numbers.is_rounded(static_cast<float>(x) * static_cast<float>(y), products[i])) ++wrong;
    if (!numbers.is_rounded(sum / 2, averages[i])) ++wrong;
    if (std::isnan(x) || std::isnan(y)) {
      if (!std::isnan(decode(dtype, largest[i])) || !std::isnan(decode(dtype, smallest[i]))) ++wrong;
    } else if (largest[i] != (y > x ? b[i] : a[i]) || smallest[i] != (y < x ? b[i] : a[i])) {
      ++wrong;
    }
  }
  CHECK(wrong == 0);
}

template <class T>
void check_integers(DType dtype) {
  CAPTURE(to_string(dtype));
  using Unsigned = std::make_unsigned_t<T>;
  std::mt19937_64 random(static_cast<std::uint64_t>(dtype));
  for (const std::size_t count : {1U, 7U, 511U, 512U, 513U, 3000U}) {
    std::vector<std::vector<T>> sources(5, std::vector<T>(count));
    for (auto& source : sources)
      for (T& value : source) value = static_cast<T>(random());
    std::vector<T> sum = sources[0];
    std::vector<T> product = sources[0];
    std::vector<T> largest = sources[0];
    std::vector<T> smallest = sources[0];
    for (std::size_t s = 1; s < sources.size(); ++s) {
      for (std::size_t i = 0; i < count; ++i) {
        sum[i] =
            static_cast<T>(static_cast<Unsigned>(static_cast<Unsigned>(sum[i]) + static_cast<Unsigned>(sources[s][i])));
        product[i] = static_cast<T>(static_cast<std::uint64_t>(product[i]) * static_cast<std::uint64_t>(sources[s][i]));
        largest[i] = std::max(largest[i], sources[s][i]);
        smallest[i] = std::min(smallest[i], sources[s][i]);
      }
    }
    CHECK(reduced<T>(Combine::sum, dtype, sources) == sum);
    CHECK(reduced<T>(Combine::product, dtype, sources) == product);
    CHECK(reduced<T>(Combine::max, dtype, sources) == largest);
    CHECK(reduced<T>(Combine::min, dtype, sources) == smallest);
  }
}

template <class T>
void check_floats(DType dtype) {
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  const T nan = std::numeric_limits<T>::quiet_NaN();
  const T inf = std::numeric_limits<T>::infinity();
  const T most = std::numeric_limits<T>::max();
  const T tiny = std::numeric_limits<T>::denorm_min();
  const std::vector<T> values = {0, -T{0}, 1, -1, nan, inf, -inf, most, -most, tiny, -tiny, T(1) / 3};
  std::vector<Bits> a;
  std::vector<Bits> b;
  for (const T x : values) {
    for (const T y : values) {
      a.push_back(std::bit_cast<Bits>(x));
      b.push_back(std::bit_cast<Bits>(y));
    }
  }
  const auto sums = reduced<Bits>(Combine::sum, dtype, {a, b});
  const auto products = reduced<Bits>(Combine::product, dtype, {a, b});
  const auto averages = reduced<Bits>(Combine::average, dtype, {a, b, a});
  const auto largest = reduced<Bits>(Combine::max, dtype, {a, b});
  const auto smallest = reduced<Bits>(Combine::min, dtype, {a, b});
  const auto is = [](Bits got, T wanted) {
    return std::isnan(wanted) ? std::isnan(std::bit_cast<T>(got)) : got == std::bit_cast<Bits>(wanted);
  };
  for (std::size_t i = 0; i < a.size(); ++i) {
    const T x = std::bit_cast<T>(a[i]);
    const T y = std::bit_cast<T>(b[i]);
    CHECK(is(sums[i], x + y));
    CHECK(is(products[i], x * y));
    CHECK(is(averages[i], (x + y + x) / 3));
    const bool is_nan = std::isnan(x) || std::isnan(y);
    CHECK(is(largest[i], is_nan ? nan : y > x ? y : x));
    CHECK(is(smallest[i], is_nan ? nan : y < x ? y : x));
  }
}

}  // namespace

TEST_CASE("every pair of 8-bit floats") {
  for (const DType dtype : {DType::f8_e4m3fn, DType::f8_e5m2}) {
    CAPTURE(to_string(dtype));
    std::vector<std::uint8_t> a;
    std::vector<std::uint8_t> b;
    for (int x = 0; x < 256; ++x) {
      for (int y = 0; y < 256; ++y) {
        a.push_back(static_cast<std::uint8_t>(x));
        b.push_back(static_cast<std::uint8_t>(y));
      }
    }
    check_pairs(dtype, a, b);
  }
}

TEST_CASE("every 16-bit float beside zeros, ones, ends of the range and random values") {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    CAPTURE(to_string(dtype));
    std::mt19937 random(7);
    std::vector<std::uint16_t> others = {0,      0x8000, 1,      0x8001, 0x0400, 0x3c00, 0x3f80,
                                         0x7bff, 0xfbff, 0x7f7f, 0x7c00, 0x7f80, 0xff80, 0x7e00};
    std::vector<std::uint16_t> a(65536);
    for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<std::uint16_t>(i);
    for (const std::uint16_t other : others) check_pairs(dtype, a, std::vector<std::uint16_t>(a.size(), other));
    std::vector<std::uint16_t> b(a.size());
    for (auto& value : b) value = static_cast<std::uint16_t>(random());
    check_pairs(dtype, a, b);
  }
}

TEST_CASE("every variant of the sum of f16 has the same bits as the first") {
  std::mt19937 random(11);
  std::vector<std::vector<std::uint16_t>> sources(3, std::vector<std::uint16_t>(65536));
  std::vector<const std::byte*> at;
  for (auto& source : sources) {
    for (auto& value : source) value = static_cast<std::uint16_t>(random());
    at.push_back(reinterpret_cast<const std::byte*>(source.data()));
  }
  const auto expected = reduced<std::uint16_t>(Combine::sum, DType::f16, sources);
  for (const merge::AddHalves add : merge::half_sum_variants()) {
    std::vector<std::uint16_t> sums(65536);
    CHECK(add(std::as_writable_bytes(std::span(sums)), at) == sums.size() * 2);
    CHECK(sums == expected);
  }
}

TEST_CASE("f8_e4m3fn: a sum past 448 is NaN from the half-way point on, f8_e5m2: infinity") {
  using Bytes = std::vector<std::uint8_t>;
  const auto sum = [](DType dtype, std::uint8_t a, std::uint8_t b) {
    return reduced<std::uint8_t>(Combine::sum, dtype, {Bytes{a}, Bytes{b}}).front();
  };
  // 448 + 16 = 464 is half-way to 480 and is rounded to the even 448; 448 + 18 is not.
  CHECK(sum(DType::f8_e4m3fn, 0x7e, 0x58) == 0x7e);
  CHECK(sum(DType::f8_e4m3fn, 0x7e, 0x59) == 0x7f);
  CHECK(sum(DType::f8_e4m3fn, 0xfe, 0xfe) == 0xff);
  CHECK(sum(DType::f8_e5m2, 0x7b, 0x7b) == 0x7c);
  CHECK(sum(DType::f8_e5m2, 0xfb, 0xfb) == 0xfc);
}

TEST_CASE("integers wrap around, booleans use logical or and and") {
  check_integers<std::uint8_t>(DType::u8);
  check_integers<std::int8_t>(DType::i8);
  check_integers<std::uint16_t>(DType::u16);
  check_integers<std::int16_t>(DType::i16);
  check_integers<std::uint32_t>(DType::u32);
  check_integers<std::int32_t>(DType::i32);
  check_integers<std::uint64_t>(DType::u64);
  check_integers<std::int64_t>(DType::i64);
  using Bytes = std::vector<std::uint8_t>;
  CHECK(reduced<std::uint8_t>(Combine::max, DType::boolean, {Bytes{0, 0, 1, 1}, Bytes{0, 1, 0, 1}}) ==
        Bytes{0, 1, 1, 1});
  for (const Combine combine : {Combine::min, Combine::product})
    CHECK(reduced<std::uint8_t>(combine, DType::boolean, {Bytes{0, 0, 1, 1}, Bytes{0, 1, 0, 1}}) == Bytes{0, 0, 0, 1});
  // Every stored value except 0 is true.
  CHECK(reduced<std::uint8_t>(Combine::max, DType::boolean, {Bytes{0, 2, 0, 128}, Bytes{0, 1, 255, 128}}) ==
        Bytes{0, 1, 1, 1});
  for (const Combine combine : {Combine::min, Combine::product})
    CHECK(reduced<std::uint8_t>(combine, DType::boolean,
                                {Bytes{1, 2, 16, 3}, Bytes{2, 4, 16, 0}, Bytes{255, 8, 16, 1}}) == Bytes{1, 1, 1, 0});
}

TEST_CASE("f32 and f64 with their special values") {
  check_floats<float>(DType::f32);
  check_floats<double>(DType::f64);
}

TEST_CASE("narrow floats are rounded once, after the last source") {
  // 1 + 2^-8 + 2^-8: rounding each step to bf16 would leave 1.
  const std::vector<std::uint16_t> one(1000, 0x3f80);
  const std::vector<std::uint16_t> small(1000, 0x3b80);
  CHECK(reduced<std::uint16_t>(Combine::sum, DType::bf16, {one, small, small}) ==
        std::vector<std::uint16_t>(1000, 0x3f81));
}

TEST_CASE("unaligned memory, any length, one source, and a target that is a source") {
  std::mt19937 random(3);
  for (const DType dtype : {DType::f16, DType::f32, DType::i64, DType::f8_e4m3fn, DType::f64}) {
    for (const std::size_t count : {0U, 1U, 3U, 64U, 511U, 1300U}) {
      const std::size_t bytes = count * itemsize(dtype);
      std::vector<std::vector<std::byte>> at_odd(3, std::vector<std::byte>(bytes + 3));
      std::vector<std::vector<std::byte>> aligned(3, std::vector<std::byte>(bytes));
      std::vector<const std::byte*> odd;
      std::vector<const std::byte*> even;
      for (std::size_t s = 0; s < 3; ++s) {
        for (std::byte& value : aligned[s]) value = static_cast<std::byte>(random());
        if (bytes != 0) std::memcpy(at_odd[s].data() + s + 1 - (s == 2 ? 2 : 0), aligned[s].data(), bytes);
        odd.push_back(at_odd[s].data() + s + 1 - (s == 2 ? 2 : 0));
        even.push_back(aligned[s].data());
      }
      std::vector<std::byte> expected(bytes);
      std::vector<std::byte> got(bytes + 1);
      reduce(Combine::sum, dtype, expected, even);
      reduce(Combine::sum, dtype, std::span(got).subspan(1), odd);
      CHECK(std::equal(expected.begin(), expected.end(), got.begin() + 1));
      std::vector<std::byte> copy(bytes);
      reduce(Combine::sum, dtype, copy, std::span(even).first(1));
      CHECK(copy == aligned[0]);
      reduce(Combine::sum, dtype, aligned[1], even);
      CHECK(aligned[1] == expected);
    }
  }
}

TEST_CASE("an unsupported reduction is refused with its name") {
  using test::has;
  using test::words_of;
  for (const DType dtype : {DType::f4_e2m1, DType::u4, DType::i4, DType::f8_e8m0, DType::complex64, DType::f8_e4m3fnuz,
                            DType::f8_e5m2fnuz, DType::f6_e2m3, DType::f6_e3m2})
    for (const Combine combine : {Combine::max, Combine::sum})
      CHECK(has(words_of(ErrorKind::unsupported, [&] { check_reducible(combine, dtype); }), to_string(dtype)));
  CHECK(has(words_of(ErrorKind::unsupported, [] { check_reducible(Combine::sum, DType::boolean); }), "BOOL"));
  CHECK(has(words_of(ErrorKind::unsupported, [] { check_reducible(Combine::average, DType::i32); }), "average"));
  check_reducible(Combine::max, DType::boolean);
}
