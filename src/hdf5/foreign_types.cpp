// SPDX-License-Identifier: Apache-2.0
#include "src/hdf5/foreign_types.hpp"

#include <array>
#include <memory>
#include <string_view>

#include "src/hdf5/foreign_id.hpp"

namespace muster::hdf5 {
namespace {

struct FloatFormat {
  DType dtype;
  std::size_t bytes;
  std::size_t exponent_bits;
  std::size_t mantissa_bits;
  std::size_t bias;
};
constexpr std::array<FloatFormat, 6> float_formats = {{
    {DType::f16, 2, 5, 10, 15},
    {DType::bf16, 2, 8, 7, 127},
    {DType::f32, 4, 8, 23, 127},
    {DType::f64, 8, 11, 52, 1023},
    {DType::f8_e5m2, 1, 5, 2, 15},
    {DType::f8_e4m3fn, 1, 4, 3, 7},
}};

ElementType refused(std::string words) {
  ElementType refusal;
  refusal.refusal = std::move(words);
  return refusal;
}

bool set_order(hid_t type, ElementType& element) {
  if (element.bytes == 1) return true;
  const H5T_order_t order = H5Tget_order(type);
  element.is_big_endian = order == H5T_ORDER_BE;
  return order == H5T_ORDER_LE || order == H5T_ORDER_BE;
}

ElementType integer(hid_t type, std::size_t bytes) {
  constexpr std::array<std::array<DType, 2>, 4> dtypes = {
      {{DType::u8, DType::i8}, {DType::u16, DType::i16}, {DType::u32, DType::i32}, {DType::u64, DType::i64}}};
  const std::size_t bits = H5Tget_precision(type);
  if (bits != bytes * 8 || H5Tget_offset(type) != 0 || (bytes != 1 && bytes != 2 && bytes != 4 && bytes != 8))
    return refused("integers of " + std::to_string(bits) + " bits in " + std::to_string(bytes) + " bytes");
  const std::size_t row = bytes == 1 ? 0 : bytes == 2 ? 1 : bytes == 4 ? 2 : 3;
  ElementType element;
  element.bytes = bytes;
  element.dtype = dtypes[row][H5Tget_sign(type) == H5T_SGN_NONE ? 0 : 1];
  return set_order(type, element) ? element : refused("integers of an odd byte order");
}

ElementType floating(hid_t type, std::size_t bytes) {
  std::size_t sign_at = 0;
  std::size_t exponent_at = 0;
  std::size_t exponent_bits = 0;
  std::size_t mantissa_at = 0;
  std::size_t mantissa_bits = 0;
  if (H5Tget_fields(type, &sign_at, &exponent_at, &exponent_bits, &mantissa_at, &mantissa_bits) < 0)
    return refused("floats whose fields are damaged");
  for (const FloatFormat& format : float_formats) {
    if (format.bytes != bytes || format.exponent_bits != exponent_bits || format.mantissa_bits != mantissa_bits)
      continue;
    if (mantissa_at != 0 || exponent_at != mantissa_bits || sign_at != bytes * 8 - 1 ||
        H5Tget_ebias(type) != format.bias || H5Tget_precision(type) != bytes * 8 || H5Tget_offset(type) != 0 ||
        H5Tget_norm(type) != H5T_NORM_IMPLIED)
      continue;
    ElementType element;
    element.bytes = bytes;
    element.dtype = format.dtype;
    return set_order(type, element) ? element : refused("floats of an odd byte order");
  }
  return refused("floats of " + std::to_string(exponent_bits) + " exponent and " + std::to_string(mantissa_bits) +
                 " mantissa bits in " + std::to_string(bytes) + " bytes");
}

std::string member_name(hid_t type, unsigned member) {
  const std::unique_ptr<char, herr_t (*)(void*)> name(H5Tget_member_name(type, member), H5free_memory);
  return name ? name.get() : std::string();
}

ElementType enumeration(hid_t type, std::size_t bytes) {
  const int members = H5Tget_nmembers(type);
  const std::string words = "an enumeration of " + std::to_string(members) + " names";
  if (bytes != 1 || members != 2) return refused(words);
  for (unsigned member = 0; member < 2; ++member) {
    unsigned char value = 0;
    if (H5Tget_member_value(type, member, &value) < 0 || value > 1) return refused(words);
    if (member_name(type, member) != (value == 0 ? "FALSE" : "TRUE")) return refused(words);
  }
  ElementType element;
  element.bytes = 1;
  element.dtype = DType::boolean;
  return element;
}

ElementType compound(hid_t type, std::size_t bytes) {
  const int members = H5Tget_nmembers(type);
  std::string words = "a compound of " + std::to_string(members) + (members == 1 ? " member" : " members");
  if (members != 2) return refused(words);
  constexpr std::array<std::string_view, 2> names = {"r", "i"};
  std::array<ElementType, 2> parts;
  for (unsigned member = 0; member < 2; ++member) {
    if (member_name(type, member) != names[member]) return refused(words);
    const TypeId part(H5Tget_member_type(type, member));
    if (!part || H5Tget_class(part.get()) != H5T_FLOAT) return refused(words);
    parts[member] = floating(part.get(), H5Tget_size(part.get()));
    if (H5Tget_member_offset(type, member) != member * parts[0].bytes) return refused(words);
  }
  if (parts[0].dtype != DType::f32 || parts[1].dtype != DType::f32 || bytes != 8 ||
      parts[0].is_big_endian != parts[1].is_big_endian)
    return refused("complex numbers of two other floats than F32");
  ElementType element;
  element.bytes = bytes;
  element.dtype = DType::complex64;
  element.is_big_endian = parts[0].is_big_endian;
  return element;
}

}  // namespace

ElementType element_type(hid_t type) {
  const std::size_t bytes = H5Tget_size(type);
  switch (H5Tget_class(type)) {
    case H5T_INTEGER:
      return integer(type, bytes);
    case H5T_FLOAT:
      return floating(type, bytes);
    case H5T_ENUM:
      return enumeration(type, bytes);
    case H5T_COMPOUND:
      return compound(type, bytes);
    case H5T_STRING: {
      ElementType element;
      element.is_text = true;
      element.bytes = bytes;
      return element;
    }
    case H5T_VLEN:
      return refused("lists of variable length");
    case H5T_REFERENCE:
      return refused("references");
    case H5T_OPAQUE:
      return refused("opaque bytes");
    case H5T_BITFIELD:
      return refused("bit fields");
    case H5T_TIME:
      return refused("times");
    case H5T_ARRAY:
      return refused("arrays as elements");
    default:
      return refused("a type that is not known here");
  }
}

}  // namespace muster::hdf5
