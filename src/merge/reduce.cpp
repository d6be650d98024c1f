// SPDX-License-Identifier: Apache-2.0
#include "src/merge/reduce.hpp"

#include <string>

#include "muster/error.hpp"

namespace muster::merge {

void check_reducible(Combine combine, DType dtype) {
  if (is_packed(dtype) || dtype == DType::f8_e8m0 || dtype == DType::complex64 ||
      (combine == Combine::sum && dtype == DType::boolean))
    throw Error(ErrorKind::unsupported, std::string("tensors of ") + std::string(to_string(dtype)) + " have no " +
                                            (combine == Combine::max ? "max" : "sum"));
}

void reduce(Combine, DType dtype, std::span<std::byte>, std::span<const std::byte* const>) {
  throw Error(ErrorKind::unsupported, std::string("reducing ") + std::string(to_string(dtype)) + " is not there yet");
}

}  // namespace muster::merge
