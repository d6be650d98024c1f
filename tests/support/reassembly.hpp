// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sources of layers, and the assembly of the parts of a streamed layer from their own descriptions.

#include <cstring>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "muster/gather_each.hpp"

namespace muster::test {

/// Returns a source of `layers` layers.
inline LayerSource layers_of(std::uint64_t layers, std::function<Config(std::uint64_t)> make) {
  return [layers, make = std::move(make), next = std::uint64_t{0}]() mutable -> std::optional<Config> {
    if (next == layers) return std::nullopt;
    return make(next++);
  };
}

class Reassembly {
 public:
  /// Adds the next part of a layer, and copies all of its data.
  void add(const LayerPart& part) {
    if (part.part != next_) throw std::runtime_error("a part is not the next one");
    ++next_;
    for (const TensorSlice& slice : part.slices) slices_[{slice.rank, slice.path}] = slice;
    for (const auto& [rank, config] : part.present()) merge(wholes_[rank], config, rank, "", part.part);
    for (const auto& [key, slice] : slices_) throw std::runtime_error("a slice of no tensor: " + slice.path);
  }
  /// Returns the layer of a rank, or nullopt if it was absent.
  [[nodiscard]] std::optional<Config> layer(int rank) const {
    const auto found = wholes_.find(rank);
    return found == wholes_.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  static std::string spelled(std::string_view key) {
    std::string text;
    for (const char c : key) text += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
    return text;
  }

  void merge(Config& whole, const Config& piece, int rank, const std::string& path, std::uint32_t part) {
    if (piece.is_tensor()) return tensor(whole, piece.as_tensor(), rank, path);
    if (piece.type() == Config::Type::array) {
      if (whole.is_null()) whole = ConfigArray(piece.size());
      for (std::size_t i = 0; i < piece.size(); ++i)
        merge(whole.as_array().at(i), piece.at(i), rank, path + "/" + std::to_string(i), part);
    } else if (piece.is_object()) {
      if (whole.is_null()) whole = ConfigObject();
      for (const auto& [key, member] : piece.as_object())
        merge(whole[key], member, rank, path + "/" + spelled(key), part);
    } else if (!piece.is_null()) {
      if (part != 0) throw std::runtime_error("a leaf that is no tensor after part 0: " + path);
      whole = piece;
    }
  }

  void tensor(Config& whole, const Tensor& piece, int rank, const std::string& path) {
    const auto found = slices_.find({rank, path});
    if (found == slices_.end()) {
      if (!whole.is_null()) throw std::runtime_error("a tensor comes twice: " + path);
      whole = Tensor::copy_of(piece);
      return;
    }
    const TensorSlice slice = found->second;
    slices_.erase(found);
    if (element_count(piece.shape()) != slice.elements || piece.dtype() != slice.tensor.dtype)
      throw std::runtime_error("a slice is not what it says: " + path);
    auto& [expected, target] = targets_[{rank, path}];
    if (whole.is_null()) {
      target = Tensor::allocate(slice.tensor.dtype, slice.tensor.shape);
      whole = target;
    }
    if (slice.offset != expected) throw std::runtime_error("a slice is not the next one: " + path);
    expected += slice.elements;
    copy_contiguous(piece, target.mutable_data() + slice.offset * bits(slice.tensor.dtype) / 8);
  }

  using Key = std::pair<int, std::string>;
  std::uint32_t next_ = 0;
  std::map<int, Config> wholes_;
  std::map<Key, TensorSlice> slices_;
  std::map<Key, std::pair<std::int64_t, Tensor>> targets_;
};

}  // namespace muster::test
