// SPDX-License-Identifier: Apache-2.0
#include "src/hdf5/file_types.hpp"

#include <cstdint>

namespace muster::hdf5 {
namespace {

Id copy_of(hid_t type) {
  return {H5Tcopy(type), "H5Tcopy"};
}

/// A float with an IEEE layout that HDF5 has no name for: sign, exponent, mantissa from the highest bit down.
Id float_type(std::size_t bytes, std::size_t exponent_bits, std::size_t mantissa_bits) {
  Id type = copy_of(H5T_IEEE_F32LE);
  const std::size_t sign_at = exponent_bits + mantissa_bits;
  // Fields first: a type may only become smaller than them afterwards.
  checked(H5Tset_fields(type.get(), sign_at, mantissa_bits, exponent_bits, 0, mantissa_bits), "H5Tset_fields");
  checked(H5Tset_offset(type.get(), 0), "H5Tset_offset");
  checked(H5Tset_precision(type.get(), 8 * bytes), "H5Tset_precision");
  checked(H5Tset_size(type.get(), bytes), "H5Tset_size");
  checked(H5Tset_ebias(type.get(), (std::size_t{1} << (exponent_bits - 1)) - 1), "H5Tset_ebias");
  return type;
}

Id bool_type() {
  Id type(H5Tenum_create(H5T_STD_I8LE), "H5Tenum_create");
  const std::int8_t no = 0;
  const std::int8_t yes = 1;
  checked(H5Tenum_insert(type.get(), "FALSE", &no), "H5Tenum_insert");
  checked(H5Tenum_insert(type.get(), "TRUE", &yes), "H5Tenum_insert");
  return type;
}

Id complex_type() {
  Id type(H5Tcreate(H5T_COMPOUND, 2 * sizeof(float)), "H5Tcreate");
  checked(H5Tinsert(type.get(), "r", 0, H5T_IEEE_F32LE), "H5Tinsert");
  checked(H5Tinsert(type.get(), "i", sizeof(float), H5T_IEEE_F32LE), "H5Tinsert");
  return type;
}

}  // namespace

Id file_type(DType dtype) {
  switch (dtype) {
    case DType::boolean:
      return bool_type();
    case DType::i8:
      return copy_of(H5T_STD_I8LE);
    case DType::u16:
      return copy_of(H5T_STD_U16LE);
    case DType::i16:
      return copy_of(H5T_STD_I16LE);
    case DType::u32:
      return copy_of(H5T_STD_U32LE);
    case DType::i32:
      return copy_of(H5T_STD_I32LE);
    case DType::u64:
      return copy_of(H5T_STD_U64LE);
    case DType::i64:
      return copy_of(H5T_STD_I64LE);
    case DType::f16:
      return float_type(2, 5, 10);
    case DType::bf16:
      return float_type(2, 8, 7);
    case DType::f32:
      return copy_of(H5T_IEEE_F32LE);
    case DType::f64:
      return copy_of(H5T_IEEE_F64LE);
    case DType::f8_e5m2:
      return float_type(1, 5, 2);
    case DType::complex64:
      return complex_type();
    case DType::u8:
    case DType::f8_e4m3fn:
    case DType::f8_e8m0:
    case DType::f4_e2m1:
    case DType::u4:
    case DType::i4:
      break;
  }
  return copy_of(H5T_STD_U8LE);
}

Id text_type(std::size_t bytes) {
  Id type = copy_of(H5T_C_S1);
  checked(H5Tset_size(type.get(), bytes), "H5Tset_size");
  checked(H5Tset_strpad(type.get(), H5T_STR_NULLPAD), "H5Tset_strpad");
  checked(H5Tset_cset(type.get(), H5T_CSET_UTF8), "H5Tset_cset");
  return type;
}

}  // namespace muster::hdf5
