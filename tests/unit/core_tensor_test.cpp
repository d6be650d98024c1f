// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "doctest/doctest.h"
#include "muster/error.hpp"
#include "muster/tensor.hpp"
#include "src/core/tensor.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;

namespace {

bool refuses(ErrorKind kind, const auto& what) {
  return !test::words_of(kind, what).empty();
}

/// The result that copy_contiguous must have, copied one element at a time.
std::vector<std::byte> copied_slowly(const TensorView& view, const Strides& strides) {
  const std::size_t item = itemsize(view.dtype());
  std::vector<std::byte> result;
  std::vector<std::int64_t> index(view.shape().size(), 0);
  for (std::int64_t n = 0; n < view.element_count(); ++n) {
    std::int64_t offset = 0;
    for (std::size_t dim = 0; dim < index.size(); ++dim) offset += index[dim] * strides[dim];
    const std::byte* element = view.data() + offset * static_cast<std::int64_t>(item);
    result.insert(result.end(), element, element + item);
    for (std::size_t dim = index.size(); dim-- > 0;) {
      if (++index[dim] < view.shape()[dim]) break;
      index[dim] = 0;
    }
  }
  return result;
}

bool copies_right(const TensorView& view, const Strides& strides) {
  // A guard after the target detects a copy that writes too much.
  std::vector<std::byte> target(view.nbytes() + 64, std::byte{0xa5});
  copy_contiguous(view, target.data());
  const std::vector<std::byte> expected = copied_slowly(view, strides);
  bool is_right = std::memcmp(target.data(), expected.data(), expected.size()) == 0;
  for (std::size_t i = expected.size(); i < target.size(); ++i) is_right &= target[i] == std::byte{0xa5};
  return is_right;
}

}  // namespace

TEST_CASE("every dtype: name, number and size agree both ways") {
  for (const DType dtype : all_dtypes()) {
    CAPTURE(to_string(dtype));
    CHECK(dtype_from_string(to_string(dtype)) == dtype);
    CHECK(dtype_from_number(static_cast<std::uint8_t>(dtype)) == dtype);
    CHECK(is_packed(dtype) == (bits(dtype) < 8));
    CHECK(elements_in_group(dtype) * bits(dtype) % 8 == 0);
    CHECK(itemsize(dtype) == static_cast<std::size_t>(bits(dtype)) / 8);
    CHECK(byte_size(dtype, {3, 5}) == static_cast<std::size_t>(15 * bits(dtype) + 7) / 8);
  }
  CHECK(all_dtypes().size() == 24);
  CHECK(!dtype_from_string("bf16"));
  CHECK(!dtype_from_string(""));
  CHECK(!dtype_from_number(24));
  CHECK(!dtype_from_number(255));
}

TEST_CASE("invalid shapes are refused") {
  CHECK(element_count({}) == 1);
  CHECK(element_count({3, 0, 5}) == 0);
  CHECK(refuses(ErrorKind::invalid_argument, [] { element_count({2, -1}); }));
  CHECK(refuses(ErrorKind::invalid_argument, [] { element_count({0, -1}); }));
  CHECK(refuses(ErrorKind::invalid_argument, [] { element_count({INT64_MAX, 2}); }));
  CHECK(refuses(ErrorKind::invalid_argument, [] { byte_size(DType::f64, {INT64_MAX / 8}); }));
  CHECK(refuses(ErrorKind::invalid_argument, [] { byte_size(DType::u8, {INT64_MAX}); }));
  CHECK(byte_size(DType::u4, {3}) == 2);
  CHECK(to_string(Shape{4, 8}) == "[4, 8]");
  CHECK(to_string(Shape{}) == "[]");
}

TEST_CASE("invalid views are refused") {
  const std::byte data[64] = {};
  CHECK(refuses(ErrorKind::invalid_argument, [] { TensorView(DType::f32, {2}, nullptr); }));
  CHECK(refuses(ErrorKind::invalid_argument, [&] { TensorView(DType::f32, {2, 2}, data, {1}); }));
  CHECK(refuses(ErrorKind::invalid_argument, [&] { TensorView(DType::u4, {2, 2}, data, {2, 1}); }));
  const TensorView strided(DType::f32, {2, 2}, data, {1, 2});
  CHECK(refuses(ErrorKind::invalid_argument, [&] { (void)strided.bytes(); }));
  CHECK(refuses(ErrorKind::invalid_argument, [&] { (void)strided.slice(2, 0, 1); }));
  CHECK(refuses(ErrorKind::invalid_argument, [&] { (void)strided.slice(0, 1, 3); }));
  CHECK(refuses(ErrorKind::invalid_argument, [&] { (void)strided.slice(0, 2, 1); }));
  CHECK(refuses(ErrorKind::invalid_argument, [&] { (void)strided.slice(0, -1, 1); }));
  CHECK(refuses(ErrorKind::invalid_argument, [&] { (void)Tensor::borrow(strided).mutable_data(); }));
}

TEST_CASE("empty tensors need no memory, scalars have one element") {
  const TensorView empty(DType::f32, {0, 4}, nullptr, {9, 9});
  CHECK(empty.is_contiguous());
  CHECK(empty.nbytes() == 0);
  CHECK(empty.slice(1, 1, 3).shape() == Shape{0, 2});
  CHECK(empty.transposed().shape() == Shape{4, 0});
  copy_contiguous(empty, nullptr);
  const Tensor scalar = test::pattern(DType::f64, {}, 1);
  CHECK(scalar.nbytes() == 8);
  CHECK(bitwise_equal(scalar, Tensor::copy_of(scalar)));
  CHECK(bitwise_equal(empty, Tensor::copy_of(empty)));
  CHECK(!bitwise_equal(empty, TensorView(DType::f32, {0, 5}, nullptr)));
  CHECK(!bitwise_equal(empty, TensorView(DType::f16, {0, 4}, nullptr)));
}

TEST_CASE("heap tensors are aligned to 64 bytes and shared by copies") {
  for (std::int64_t size = 0; size < 100; size += 7) {
    const Tensor tensor = Tensor::allocate(DType::u8, {size});
    CHECK(reinterpret_cast<std::uintptr_t>(tensor.data()) % 64 == 0);
    const Tensor same = tensor;  // NOLINT(performance-unnecessary-copy-initialization): the copy is the test
    CHECK(same.data() == tensor.data());
    CHECK(same.owner() == tensor.owner());
  }
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // sanitizers end the process here
  CHECK(refuses(ErrorKind::out_of_space, [] { Tensor::allocate(DType::u8, {std::int64_t{1} << 52}); }));
#endif
}

TEST_CASE("a slice of a larger storage has only its own elements") {
  const Tensor storage = test::pattern(DType::bf16, {100, 64}, 5);
  const TensorView rows = storage.view().slice(0, 10, 12);
  CHECK(rows.is_contiguous());
  CHECK(rows.nbytes() == 2 * 64 * 2);
  CHECK(rows.data() == storage.data() + 10 * 64 * 2);
  const TensorView columns = storage.view().slice(1, 3, 8);
  CHECK(!columns.is_contiguous());
  CHECK(columns.nbytes() == 100 * 5 * 2);
  CHECK(copies_right(columns, {64, 1}));
  const Tensor copy = Tensor::copy_of(columns);
  CHECK(copy.nbytes() == 1000);
  CHECK(bitwise_equal(copy, columns));
  CHECK(copies_right(columns.slice(0, 7, 90).transposed(), {1, 64}));
}

TEST_CASE("every dtype: slices, transposes and their copies") {
  for (const DType dtype : all_dtypes()) {
    CAPTURE(to_string(dtype));
    const Tensor tensor = test::pattern(dtype, {6, 10}, 3);
    CHECK(bitwise_equal(tensor, Tensor::copy_of(tensor)));
    CHECK(tensor.view().slice(0, 2, 4).shape() == Shape{2, 10});
    if (is_packed(dtype)) {
      CHECK(refuses(ErrorKind::invalid_argument, [&] { (void)tensor.view().transposed(); }));
      CHECK(refuses(ErrorKind::invalid_argument, [&] { (void)tensor.view().slice(1, 0, 2); }));
      CHECK(tensor.view().slice(0, 2, 4).data() == tensor.data() + 20 * bits(dtype) / 8);
    } else {
      CHECK(bitwise_equal(Tensor::copy_of(tensor.view().transposed()).view().transposed(), tensor));
      CHECK(copies_right(tensor.view().transposed(), {1, 10}));
      CHECK(copies_right(tensor.view().slice(1, 2, 7), {10, 1}));
    }
  }
}

TEST_CASE("a slice of packed elements ends at a byte") {
  const Tensor tensor = test::pattern(DType::i4, {7}, 1);
  CHECK(tensor.nbytes() == 4);
  CHECK(tensor.view().slice(0, 2, 7).nbytes() == 3);
  CHECK(tensor.view().slice(0, 0, 2).nbytes() == 1);
  CHECK(refuses(ErrorKind::invalid_argument, [&] { (void)tensor.view().slice(0, 1, 3); }));
  CHECK(refuses(ErrorKind::invalid_argument, [&] { (void)tensor.view().slice(0, 0, 3); }));
}

TEST_CASE("strides of any sign and zero copy as one element at a time would") {
  std::mt19937_64 random(1);
  const auto below = [&](std::uint64_t end) { return static_cast<std::int64_t>(random() % end); };
  const std::vector<std::byte> memory = [] {
    std::vector<std::byte> bytes(1 << 20);
    test::fill(bytes.data(), bytes.size(), 1);
    return bytes;
  }();
  for (int round = 0; round < 2000; ++round) {
    const DType dtype = std::vector{DType::u8, DType::bf16, DType::f32, DType::complex64}[random() % 4];
    Shape shape(1 + random() % 4);
    for (std::int64_t& extent : shape) extent = 1 + below(round % 10 == 0 ? 40 : 6);
    if (element_count(shape) > 20000) continue;
    // A permutation of a row-major layout with gaps, negative strides and repetition.
    std::vector<std::size_t> order(shape.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::shuffle(order.begin(), order.end(), random);
    Strides strides(shape.size());
    std::int64_t step = 1 + below(2);
    std::int64_t first = 0;
    for (const std::size_t dim : order) {
      const auto choice = below(6);
      strides[dim] = choice == 0 ? 0 : (choice == 1 ? -step : step);
      if (strides[dim] < 0) first -= strides[dim] * (shape[dim] - 1);
      step *= shape[dim] + (below(3) == 0 ? 1 : 0);
    }
    if (static_cast<std::size_t>(step + first) * 8 > memory.size()) continue;
    const TensorView view(dtype, shape, memory.data() + static_cast<std::size_t>(first) * itemsize(dtype), strides);
    CAPTURE(round);
    CHECK(copies_right(view, strides));
    CHECK(bitwise_equal(view, Tensor::copy_of(view)));
  }
}

TEST_CASE("large transposes are correct at edges that tiles do not divide") {
  for (const DType dtype : {DType::u8, DType::f16, DType::f32, DType::f64}) {
    const Tensor tensor = test::pattern(dtype, {133, 5, 71}, 9);
    CHECK(copies_right(tensor.view().transposed(), {1, 71, 355}));
    const TensorView inner(dtype, {5, 71, 133}, tensor.data(), {71, 1, 355});
    CHECK(copies_right(inner, {71, 1, 355}));
  }
}

TEST_CASE("equality compares bits: the sign of zero and NaN payloads count") {
  const double values[] = {0.0, -0.0};
  const TensorView zero(DType::f64, {1}, values);
  const TensorView minus(DType::f64, {1}, values + 1);
  CHECK(!bitwise_equal(zero, minus));
  const std::uint64_t nans[] = {0x7ff8000000000000, 0x7ff8000000000000, 0x7ff8000000000001};
  CHECK(bitwise_equal(TensorView(DType::f64, {1}, nans), TensorView(DType::f64, {1}, nans + 1)));
  CHECK(!bitwise_equal(TensorView(DType::f64, {1}, nans), TensorView(DType::f64, {1}, nans + 2)));
  CHECK(!bitwise_equal(TensorView(DType::f64, {1}, nans), TensorView(DType::u64, {1}, nans)));
}

namespace {

/// An address without memory: reading it ends the test.
TensorView on_device(Shape shape, Strides strides = {}) {
  return {
      DType::f32, std::move(shape), reinterpret_cast<const void*>(0x1000), std::move(strides), {Device::Kind::cuda, 3}};
}

}  // namespace

TEST_CASE("the device of a tensor is reported, and slices and transposes keep it") {
  CHECK(to_string(Device{}) == "host");
  CHECK(to_string(Device{Device::Kind::cuda, 3}) == "cuda:3");
  const float number = 1;
  CHECK(TensorView(DType::f32, {}, &number).device().is_host());
  const TensorView view = on_device({4, 6});
  CHECK(view.device() == Device{Device::Kind::cuda, 3});
  CHECK(view.slice(0, 1, 3).device() == view.device());
  CHECK(view.slice(1, 1, 3).device() == view.device());
  CHECK(view.transposed().device() == view.device());
  CHECK(Tensor::borrow(view).device() == view.device());
  const TensorView packed(DType::f4_e2m1, {4, 2}, reinterpret_cast<const void*>(0x1000), {}, {Device::Kind::cuda, 1});
  CHECK(packed.slice(0, 1, 2).device() == packed.device());
  CHECK(test::words_of(ErrorKind::invalid_argument, [] {
          TensorView(DType::u8, {0}, nullptr, {}, {Device::Kind::cuda, -1});
        }) == "tensor of shape [0]: the device index -1 must not be negative");
}

TEST_CASE("elements on a device are never read by the CPU") {
  const TensorView view = on_device({4, 6});
  const TensorView strided = on_device({4, 6}, {12, 2});
  std::vector<std::byte> target(view.nbytes());
  const Tensor here = Tensor::allocate(DType::f32, {4, 6});
  const std::string words = test::words_of(ErrorKind::invalid_argument, [&] { (void)view.bytes(); });
  CHECK(words.find("is on cuda:3") != std::string::npos);
  CHECK(words.find("Copy it to the host first") != std::string::npos);
  CHECK(test::words_of(ErrorKind::invalid_argument, [&] { (void)view.host_data(); }) == words);
  CHECK(test::words_of(ErrorKind::invalid_argument, [&] { copy_contiguous(view, target.data()); }) == words);
  CHECK(test::words_of(ErrorKind::invalid_argument, [&] { copy_contiguous(strided, target.data()); }) == words);
  CHECK(test::words_of(ErrorKind::invalid_argument, [&] { Tensor::copy_of(view); }) == words);
  CHECK(test::words_of(ErrorKind::invalid_argument, [&] { (void)bitwise_equal(view, here); }) == words);
  CHECK(test::words_of(ErrorKind::invalid_argument, [&] { (void)bitwise_equal(here, strided); }) == words);
  CHECK(test::words_of(ErrorKind::invalid_argument, [&] { core::copy_elements(view, 1, 3, target.data()); }) == words);
  CHECK(test::words_of(ErrorKind::invalid_argument, [&] { core::copy_elements(strided, 0, 24, target.data()); }) ==
        words);
  // This tensor has no elements to read.
  CHECK(bitwise_equal(on_device({0}), on_device({0})));
  CHECK_FALSE(bitwise_equal(view, on_device({6, 4})));
}

static_assert(dtype_of<bool> == DType::boolean && dtype_of<std::byte> == DType::u8 &&
              dtype_of<std::int8_t> == DType::i8);
static_assert(dtype_of<long long> == DType::i64 && dtype_of<unsigned long> == DType::u64);
static_assert(dtype_of<float> == DType::f32 && dtype_of<double> == DType::f64);

TEST_CASE("elements of a C++ type are read, written and kept") {
  std::vector<std::int16_t> numbers = {1, 2, 3, 4, 5, 6};
  const TensorView view = view_of(numbers, {2, 3});
  CHECK(view.dtype() == DType::i16);
  CHECK(view.data<std::int16_t>() == numbers.data());
  CHECK(view.values<std::int16_t>()[5] == 6);
  CHECK(view.transposed().data<std::int16_t>()[3] == 4);
  CHECK(view_of(std::span(numbers)).shape() == Shape{6});
  const Tensor kept = Tensor::take(std::move(numbers), {3, 2});
  kept.mutable_values<std::int16_t>()[0] = 7;
  CHECK(kept.values<std::int16_t>()[0] == 7);
  CHECK(Tensor::take(std::vector<double>()).shape() == Shape{0});
  CHECK(refuses(ErrorKind::invalid_argument, [&] { (void)view_of(std::span(kept.values<std::int16_t>()), {4}); }));
  CHECK(refuses(ErrorKind::invalid_argument, [&] { (void)kept.values<std::uint16_t>(); }));
  CHECK(refuses(ErrorKind::invalid_argument, [&] { (void)kept.view().transposed().values<std::int16_t>(); }));
  CHECK(refuses(ErrorKind::invalid_argument, [&] { (void)Tensor::borrow(kept).mutable_values<std::int16_t>(); }));
  const TensorView odd(DType::i16, {1}, kept.data() + 1);
  CHECK(refuses(ErrorKind::invalid_argument, [&] { (void)odd.data<std::int16_t>(); }));
  CHECK(refuses(ErrorKind::invalid_argument, [] {
    (void)TensorView(DType::f32, {1}, reinterpret_cast<const void*>(64), {}, {Device::Kind::cuda, 0}).data<float>();
  }));
}

namespace {
struct PairOfFours {
  std::uint8_t bits;
};
}  // namespace
template <>
struct muster::DTypeOf<PairOfFours> {
  static constexpr DType value = DType::f4_e2m1;
};

TEST_CASE("a type whose size differs from the dtype's is refused; a tensor without elements is writable, too") {
  const Tensor packed = Tensor::allocate(DType::f4_e2m1, {8});
  CHECK_THROWS_AS((void)packed.view().values<PairOfFours>(), Error);
  const std::vector<PairOfFours> pairs(4);
  CHECK_THROWS_AS((void)view_of(pairs), Error);
  Tensor none = Tensor::take(std::vector<float>{});
  CHECK(none.shape() == Shape{0});
  CHECK(none.mutable_values<float>().empty());
}
