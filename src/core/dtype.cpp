// SPDX-License-Identifier: Apache-2.0
#include "muster/dtype.hpp"

#include <array>
#include <numeric>

namespace muster {
namespace {

struct Entry {
  DType dtype;
  std::uint8_t bits;
  std::string_view name;
};

// In the order of the wire numbers: the position is the number.
constexpr std::array table = {
    Entry{DType::boolean, 8, "BOOL"},
    Entry{DType::u8, 8, "U8"},
    Entry{DType::i8, 8, "I8"},
    Entry{DType::u16, 16, "U16"},
    Entry{DType::i16, 16, "I16"},
    Entry{DType::u32, 32, "U32"},
    Entry{DType::i32, 32, "I32"},
    Entry{DType::u64, 64, "U64"},
    Entry{DType::i64, 64, "I64"},
    Entry{DType::f16, 16, "F16"},
    Entry{DType::bf16, 16, "BF16"},
    Entry{DType::f32, 32, "F32"},
    Entry{DType::f64, 64, "F64"},
    Entry{DType::f8_e4m3fn, 8, "F8_E4M3"},
    Entry{DType::f8_e5m2, 8, "F8_E5M2"},
    Entry{DType::f8_e8m0, 8, "F8_E8M0"},
    Entry{DType::f4_e2m1, 4, "F4"},
    Entry{DType::u4, 4, "U4"},
    Entry{DType::i4, 4, "I4"},
    Entry{DType::complex64, 64, "C64"},
    Entry{DType::f8_e4m3fnuz, 8, "F8_E4M3FNUZ"},
    Entry{DType::f8_e5m2fnuz, 8, "F8_E5M2FNUZ"},
    Entry{DType::f6_e2m3, 6, "F6_E2M3"},
    Entry{DType::f6_e3m2, 6, "F6_E3M2"},
};

constexpr bool is_in_order() {
  for (std::size_t i = 0; i < table.size(); ++i)
    if (static_cast<std::size_t>(table[i].dtype) != i) return false;
  return true;
}
static_assert(is_in_order());

const Entry& entry(DType dtype) noexcept {
  return table[static_cast<std::size_t>(dtype)];
}

constexpr auto dtypes = [] {
  std::array<DType, table.size()> all{};
  for (std::size_t i = 0; i < table.size(); ++i) all[i] = table[i].dtype;
  return all;
}();

}  // namespace

std::span<const DType> all_dtypes() noexcept {
  return dtypes;
}
int bits(DType dtype) noexcept {
  return entry(dtype).bits;
}
std::size_t itemsize(DType dtype) noexcept {
  return entry(dtype).bits / 8U;
}
bool is_packed(DType dtype) noexcept {
  return entry(dtype).bits < 8;
}
int elements_in_group(DType dtype) noexcept {
  return 8 / std::gcd(int{entry(dtype).bits}, 8);
}
std::string_view to_string(DType dtype) noexcept {
  return entry(dtype).name;
}

std::optional<DType> dtype_from_string(std::string_view name) noexcept {
  for (const Entry& each : table)
    if (each.name == name) return each.dtype;
  return std::nullopt;
}

std::optional<DType> dtype_from_number(std::uint8_t number) noexcept {
  if (number >= table.size()) return std::nullopt;
  return table[number].dtype;
}

}  // namespace muster
