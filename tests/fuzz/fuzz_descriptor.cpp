// SPDX-License-Identifier: Apache-2.0
// Any bytes as a descriptor. They are refused with an Error, or yield a tree that is restored from its own descriptor.

#include <cstddef>
#include <cstdint>
#include <span>

#include "muster/error.hpp"
#include "src/core/descriptor.hpp"
#include "tests/fuzz/target.hpp"

namespace {

using namespace muster;
using muster::test::may_fail;
using muster::test::require;

constexpr std::uint64_t memory_size = 4096;
// All bytes are equal, so that a tensor may get another offset.
const std::byte memory[memory_size] = {};

Tensor in_memory(DType dtype, const Shape& shape, std::uint64_t nbytes, core::TensorLocation place) {
  if (nbytes > memory_size || place.offset > memory_size - nbytes)
    throw Error(ErrorKind::corrupt, "a tensor lies outside its memory");
  return Tensor::borrow(TensorView(dtype, shape, memory + place.offset));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span bytes(reinterpret_cast<const std::byte*>(data), size);
  may_fail({ErrorKind::corrupt, ErrorKind::version}, [&] {
    const Config config = core::decode_descriptor(bytes, in_memory);
    const auto again = core::encode_descriptor(config, [](const Tensor& tensor) {
      return std::optional(core::TensorLocation{1, static_cast<std::uint64_t>(tensor.data() - memory)});
    });
    require(core::decode_descriptor(again, in_memory) == config);
  });
  return 0;
}
