// SPDX-License-Identifier: Apache-2.0
#include "src/gather/slicing.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "muster/error.hpp"
#include "src/core/tensor.hpp"

namespace muster::gather {
namespace {

/// Appends a key in the spelling of a JSON pointer.
void append_key(std::string& path, std::string_view key) {
  path += '/';
  for (const char letter : key) {
    if (letter == '~')
      path += "~0";
    else if (letter == '/')
      path += "~1";
    else
      path += letter;
  }
}

/// Calls visit(leaf, path) with each leaf. Throws Error(invalid_argument) on nesting beyond max_config_depth.
void visit_paths(const Config& value, std::string& path, const auto& visit, int depth = 0) {
  detail::check_config_depth(depth);
  const std::size_t length = path.size();
  if (value.is_array()) {
    std::size_t index = 0;
    for (const Config& item : value.as_array()) {
      path += '/' + std::to_string(index++);
      visit_paths(item, path, visit, depth + 1);
      path.resize(length);
    }
  } else if (value.is_object()) {
    for (const auto& [key, member] : value.as_object()) {
      append_key(path, key);
      visit_paths(member, path, visit, depth + 1);
      path.resize(length);
    }
  } else {
    visit(value, path);
  }
}

std::int64_t row_elements(const TensorView& tensor) {
  return tensor.shape().empty() ? 1 : tensor.element_count() / tensor.shape().front();
}

/// Returns how many elements fit into `bytes`. Packed elements are counted in whole groups, so that the next piece
/// begins at a byte boundary.
std::int64_t elements_in(DType dtype, std::uint64_t bytes) {
  const auto group = static_cast<std::uint64_t>(elements_in_group(dtype));
  const std::uint64_t group_bytes = group * static_cast<std::uint64_t>(bits(dtype)) / 8;
  return static_cast<std::int64_t>(bytes / group_bytes * group);
}

/// Returns the smallest number of rows after which the next piece begins at a byte boundary. It exceeds 1 if rows share
/// bytes.
std::int64_t rows_at_once(const TensorView& tensor) {
  const std::int64_t group = elements_in_group(tensor.dtype());
  return group / std::gcd(group, row_elements(tensor));
}

/// Returns whether the tensor is cut into rows instead of flat runs.
bool is_cut_by_rows(const TensorView& tensor, std::uint64_t part_bytes) {
  return !tensor.shape().empty() &&
         row_elements(tensor) * rows_at_once(tensor) <= elements_in(tensor.dtype(), part_bytes);
}

TensorSlice slice_of(const Config& told, int rank) {
  TensorSlice slice{.rank = rank, .path = told.at(0).as_string(), .tensor = {}};
  const std::uint64_t number = told.at(1).as_uint();
  const auto dtype = number <= UINT8_MAX ? dtype_from_number(static_cast<std::uint8_t>(number)) : std::nullopt;
  if (!dtype) throw Error(ErrorKind::corrupt, "malformed message of a rank: a slice has an unknown dtype");
  slice.tensor.dtype = *dtype;
  for (const Config& extent : told.at(2).as_array()) slice.tensor.shape.push_back(extent.as_int());
  slice.offset = told.at(3).as_int();
  slice.elements = told.at(4).as_int();
  const std::int64_t count = element_count(slice.tensor.shape);
  if (slice.offset < 0 || slice.elements < 0 || slice.elements > count - slice.offset)
    throw Error(ErrorKind::corrupt, "malformed message of a rank: a slice is outside its tensor");
  return slice;
}

}  // namespace

std::vector<std::byte> encode_slices(const std::vector<TensorSlice>& slices) {
  ConfigArray all;
  for (const TensorSlice& slice : slices) {
    ConfigArray extents;
    for (const std::int64_t extent : slice.tensor.shape) extents.emplace_back(extent);
    all.push_back(ConfigArray{slice.path, static_cast<int>(slice.tensor.dtype), std::move(extents), slice.offset,
                              slice.elements});
  }
  return core::encode_descriptor(all, [](const Tensor&) { return std::nullopt; });
}

std::vector<TensorSlice> decode_slices(std::span<const std::byte> bytes, int rank) {
  std::vector<TensorSlice> slices;
  if (bytes.empty()) return slices;
  try {
    const Config told =
        core::decode_descriptor(bytes, [](DType, const Shape&, std::uint64_t, core::TensorLocation) -> Tensor {
          throw Error(ErrorKind::corrupt, "malformed message of a rank: slices must not have tensors");
        });
    for (const Config& slice : told.as_array()) slices.push_back(slice_of(slice, rank));
  } catch (const Error& error) {
    throw Error(ErrorKind::corrupt, fmt::format("slices of rank {}: {}", rank, error.what()));
  }
  return slices;
}

Tensor flat_run(const Tensor& source, std::int64_t first, std::int64_t elements) {
  const TensorView& view = source.view();
  if (view.is_contiguous()) {
    const std::int64_t offset = first * bits(view.dtype()) / 8;
    const std::byte* data = view.data() == nullptr ? nullptr : view.data() + offset;
    return {TensorView(view.dtype(), {elements}, data, {}, view.device()), source.owner()};
  }
  Tensor run = Tensor::allocate(view.dtype(), {elements});
  core::copy_elements(view, first, first + elements, run.mutable_data());
  return run;
}

LayerParts::LayerParts(const Config& layer, std::uint64_t part_bytes, Moves moves)
    : layer_(layer), part_bytes_(part_bytes), moves_(std::move(moves)) {
  std::string path;
  visit_paths(layer, path, [this](const Config& leaf, const std::string& at) {
    if (leaf.is_tensor()) place(leaf.as_tensor(), at);
  });
  count_ = part_ + 1;
}

Config LayerParts::make(std::uint32_t part, std::vector<TensorSlice>* slices) const {
  if (count_ == 1) return layer_;
  std::size_t next = 0;
  return map_leaves(layer_, [&](const Config& leaf) -> Config {
    if (!leaf.is_tensor()) return part == 0 ? leaf : Config();
    const TreeLeaf& at = leaves_[next++];
    const TensorView& view = at.tensor->view();
    if (part < at.part && part == 0 && slices != nullptr)
      slices->push_back({0, at.path, {view.dtype(), view.shape()}, 0, 0});
    if (at.pieces.empty()) return at.part == part ? leaf : Config();
    if (part < at.part || part - at.part >= at.pieces.size()) return {};
    const SlicedPiece& piece = at.pieces[part - at.part];
    if (slices != nullptr) slices->push_back({0, at.path, {view.dtype(), view.shape()}, piece.first, piece.elements});
    if (!is_cut_by_rows(view, part_bytes_)) return flat_run(*at.tensor, piece.first, piece.elements);
    const std::int64_t row = row_elements(view);
    return Tensor(view.slice(0, piece.first / row, (piece.first + piece.elements) / row), at.tensor->owner());
  });
}

void LayerParts::place(const Tensor& tensor, const std::string& path) {
  const std::uint64_t bytes = tensor.nbytes();
  TreeLeaf leaf{&tensor, part_, path, {}};
  if (bytes != 0 && moves_(tensor.view())) {
    if (bytes > part_bytes_) {
      cut(leaf);
    } else {
      if (bytes > room()) next_part();
      layout_.place(bytes);
      leaf.part = part_;
    }
  }
  leaves_.push_back(std::move(leaf));
}

void LayerParts::cut(TreeLeaf& leaf) {
  const TensorView& view = leaf.tensor->view();
  const bool by_rows = is_cut_by_rows(view, part_bytes_);
  const std::int64_t step = by_rows ? row_elements(view) * rows_at_once(view) : 1;
  if (by_rows ? elements_in(view.dtype(), room()) < step : layout_.size() != 0) next_part();
  leaf.part = part_;
  for (std::int64_t first = 0; first < view.element_count();) {
    if (first != 0) next_part();
    const std::int64_t most = elements_in(view.dtype(), room()) / step * step;
    const std::int64_t elements = std::min(most, view.element_count() - first);
    layout_.place(byte_size(view.dtype(), {elements}));
    leaf.pieces.push_back({part_, first, elements});
    first += elements;
  }
}

void LayerParts::next_part() {
  if (part_ == UINT32_MAX - 1)
    throw Error(ErrorKind::invalid_argument, "layer: it has more parts than 32 bits can count");
  ++part_;
  layout_ = core::SlotLayout();
}

std::uint64_t LayerParts::room() const {
  const std::uint64_t used =
      (layout_.size() + core::tensor_alignment - 1) / core::tensor_alignment * core::tensor_alignment;
  return part_bytes_ - std::min(part_bytes_, used);
}

void list_tensors(LayerPart& part) {
  auto slice = part.slices.begin();
  for (const auto& [rank, config] : part.present()) {
    std::string path;
    visit_paths(config, path, [&, rank = rank](const Config& leaf, const std::string& at) {
      if (slice != part.slices.end() && slice->rank == rank && slice->path == at)
        part.tensors.push_back({rank, at, (slice++)->tensor});
      else if (leaf.is_tensor())
        part.tensors.push_back({rank, at, {leaf.as_tensor().dtype(), leaf.as_tensor().shape()}});
    });
  }
  std::erase_if(part.slices, [](const TensorSlice& each) { return each.elements == 0; });
}

}  // namespace muster::gather
