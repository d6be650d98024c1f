// SPDX-License-Identifier: Apache-2.0
#include "tests/support/merge_model.hpp"

#include <algorithm>
#include <cstring>

#include "src/merge/layout.hpp"
#include "src/merge/reduce.hpp"

namespace muster::test {
namespace {

std::size_t product(const Shape& shape, std::size_t begin, std::size_t end) {
  std::size_t count = 1;
  for (std::size_t i = begin; i < end; ++i) count *= static_cast<std::size_t>(shape[i]);
  return count;
}

/// Concatenates the tensors along `dim`. With `blocks`, concatenates each block separately.
Tensor model_concat(const std::vector<Tensor>& sources, std::size_t dim, const std::vector<std::int64_t>& blocks) {
  Shape shape = sources.front().shape();
  shape[dim] = 0;
  for (const Tensor& source : sources) shape[dim] += source.shape()[dim];
  const Tensor whole = Tensor::allocate(sources.front().dtype(), shape);
  const std::size_t outer = product(shape, 0, dim);
  const std::size_t inner_bits =
      product(shape, dim + 1, shape.size()) * static_cast<std::size_t>(bits(sources.front().dtype()));
  std::int64_t weight = 0;
  for (const std::int64_t block : blocks) weight += block;
  std::byte* target = whole.mutable_data();
  for (std::size_t row = 0; row < outer; ++row) {
    std::vector<std::size_t> done(sources.size(), 0);
    for (const std::int64_t block : blocks) {
      for (std::size_t i = 0; i < sources.size(); ++i) {
        const auto units = static_cast<std::size_t>(sources[i].shape()[dim]);
        const std::size_t bytes =
            units * static_cast<std::size_t>(block) / static_cast<std::size_t>(weight) * inner_bits / 8;
        const std::byte* from = sources[i].data() + row * (units * inner_bits / 8) + done[i];
        if (bytes != 0) std::memcpy(target, from, bytes);
        target += bytes;
        done[i] += bytes;
      }
    }
  }
  return whole;
}

}  // namespace

Tensor merge_model(const Merge& merge, const std::vector<Tensor>& sources) {
  const Tensor& first = sources.front();
  if (const auto* concat = std::get_if<merge::Concat>(&merge)) {
    const auto dims = static_cast<std::int64_t>(first.shape().size());
    const auto dim = static_cast<std::size_t>(concat->dim < 0 ? concat->dim + dims : concat->dim);
    return model_concat(sources, dim, concat->blocks.empty() ? std::vector<std::int64_t>{1} : concat->blocks);
  }
  if (std::holds_alternative<merge::Stack>(merge)) {
    Shape shape = first.shape();
    shape.insert(shape.begin(), static_cast<std::int64_t>(sources.size()));
    const Tensor whole = Tensor::allocate(first.dtype(), shape);
    for (std::size_t i = 0; i < sources.size(); ++i)
      for (std::size_t b = 0; b < first.nbytes(); ++b)
        whole.mutable_data()[i * first.nbytes() + b] = sources[i].data()[b];
    return whole;
  }
  if (std::holds_alternative<merge::Max>(merge) || std::holds_alternative<merge::Sum>(merge)) {
    // The unit test merge_reduce checks the arithmetic of the elements. This model only determines which elements are
    // combined.
    const auto combine = std::holds_alternative<merge::Max>(merge) ? merge::Combine::max : merge::Combine::sum;
    const Tensor whole = Tensor::allocate(first.dtype(), first.shape());
    const std::size_t piece = 1001 * itemsize(first.dtype());
    for (std::size_t at = 0; at < first.nbytes(); at += piece) {
      std::vector<const std::byte*> parts;
      for (const Tensor& source : sources) parts.push_back(source.data() + at);
      merge::reduce(combine, first.dtype(), {whole.mutable_data() + at, std::min(piece, first.nbytes() - at)}, parts);
    }
    return whole;
  }
  return first;
}

}  // namespace muster::test
