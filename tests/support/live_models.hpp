// SPDX-License-Identifier: Apache-2.0
#pragma once
// Random models, cut at random over ranks. Every rank makes the same model from the same seed, and keeps its own parts.

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "muster/live_export.hpp"
#include "tests/support/patterns.hpp"

namespace muster::test {

struct LiveModel {
  std::map<std::string, Tensor> wholes;
  std::vector<std::vector<TensorPart>> parts;  ///< of each rank
};

class LiveModels {
 public:
  LiveModels(unsigned seed, int ranks) : random_(seed), ranks_(ranks) {}

  LiveModel next() {
    LiveModel model{{}, std::vector<std::vector<TensorPart>>(static_cast<std::size_t>(ranks_))};
    // Some models are cut by stages: each tensor is on one rank. In some, experts are whole slices.
    const auto kind = below(4);
    for (auto i = below(7); i >= 0; --i) {
      const std::string name = "layers." + std::to_string(i) + ".weight";
      const Tensor whole = pattern(dtypes_[static_cast<std::size_t>(below(dtypes_.size()))], shape(), random_());
      model.wholes.emplace(name, whole);
      add(model, name, whole, static_cast<int>(kind));
      // A tied tensor has the same memory under another name.
      if (below(6) == 0) {
        model.wholes.emplace(name + "_tied", whole);
        add(model, name + "_tied", whole, static_cast<int>(kind));
      }
    }
    for (auto& parts : model.parts) std::ranges::shuffle(parts, random_);
    return model;
  }

  std::int64_t below(std::uint64_t count) { return static_cast<std::int64_t>(random_() % count); }

 private:
  struct Box {
    Shape begin;
    Shape extents;
  };

  Shape shape() {
    Shape whole;
    const auto dims = static_cast<std::size_t>(below(6));
    while (whole.size() < dims) whole.push_back(below(dims < 3 ? 70 : 7));
    return whole;
  }

  [[nodiscard]] static bool may_cut(const Tensor& whole, std::size_t dim) {
    if (!is_packed(whole.dtype())) return true;
    // Packed elements can be sliced between bytes of the outermost dimension.
    std::int64_t below = 1;
    for (std::size_t i = 1; i < whole.shape().size(); ++i) below *= whole.shape()[i];
    return dim == 0 && below * bits(whole.dtype()) % 8 == 0;
  }

  void cut(const Tensor& whole, Box box, int depth, std::vector<Box>& boxes) {
    std::vector<std::size_t> dims;
    for (std::size_t dim = 0; dim < box.extents.size(); ++dim)
      if (may_cut(whole, dim)) dims.push_back(dim);
    if (depth == 0 || dims.empty()) return boxes.push_back(std::move(box));
    const std::size_t dim = dims[static_cast<std::size_t>(below(dims.size()))];
    const std::int64_t at = below(static_cast<std::uint64_t>(box.extents[dim]) + 1);
    Box rest = box;
    box.extents[dim] = at;
    rest.begin[dim] += at;
    rest.extents[dim] -= at;
    cut(whole, std::move(box), depth - 1, boxes);
    cut(whole, std::move(rest), depth - 1, boxes);
  }

  void add(LiveModel& model, const std::string& name, const Tensor& whole, int kind) {
    const Box all{Shape(whole.shape().size(), 0), whole.shape()};
    std::vector<Box> boxes;
    if (kind == 0) {
      boxes.push_back(all);
    } else if (kind == 1 && !all.extents.empty() && may_cut(whole, 0)) {
      for (std::int64_t i = 0; i < all.extents[0]; ++i) {
        boxes.push_back(all);
        boxes.back().begin[0] = i;
        boxes.back().extents[0] = 1;
      }
      if (boxes.empty()) boxes.push_back(all);
    } else {
      cut(whole, all, static_cast<int>(below(4)), boxes);
    }
    // A box that overlaps others.
    if (below(5) == 0) {
      std::vector<Box> more;
      cut(whole, all, 2, more);
      boxes.push_back(more.front());
    }
    for (const Box& box : boxes) {
      const auto owner = below(static_cast<std::uint64_t>(ranks_));
      for (std::int64_t rank = 0; rank < ranks_; ++rank)
        if (rank == owner || below(8) == 0)
          model.parts[static_cast<std::size_t>(rank)].push_back(part(name, whole, box));
    }
  }

  TensorPart part(const std::string& name, const Tensor& whole, const Box& box) {
    TensorView view = whole.view();
    for (std::size_t dim = 0; dim < box.begin.size(); ++dim)
      if (box.extents[dim] != whole.shape()[dim])
        view = view.slice(dim, box.begin[dim], box.begin[dim] + box.extents[dim]);
    const bool is_whole = box.extents == whole.shape() && below(2) == 0;
    TensorPart part{name, below(2) == 0 ? Tensor(view, whole.owner()) : Tensor::copy_of(view)};
    if (is_whole) return part;
    part.whole = whole.shape();
    part.offset = box.begin;
    return part;
  }

  const std::vector<DType> dtypes_ = [] {
    std::vector<DType> all;
    for (int number = 0; number < 256; ++number)
      if (const auto dtype = dtype_from_number(static_cast<std::uint8_t>(number))) all.push_back(*dtype);
    return all;
  }();
  std::mt19937 random_;
  int ranks_;
};

}  // namespace muster::test
