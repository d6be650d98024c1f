// SPDX-License-Identifier: Apache-2.0
// The relevant parts of the metadata:
//
//   state_dict_metadata {name: TensorStorageMetadata{properties, size, chunks [{offsets, sizes}]} | bytes}
//   mcore_data {name: {nd_reformulated_orig_global_shape}}, Megatron only
//   storage_data {MetadataIndex{fqn, offset}: _StorageInfo{relative_path, offset, length, transform_descriptors}}
//
// A chunk is identified by its tensor's name and its offsets; neither list is sorted.

#include "src/checkpoint/foreign/dcp_metadata.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/foreign/torch_archive.hpp"
#include "src/checkpoint/model_files.hpp"

namespace muster::foreign {
namespace {

constexpr std::string_view dcp_module = "torch.distributed.checkpoint.metadata.";

bool is_dcp(const Pickle& pickle, Pickle::Ref node, std::string_view name) {
  const std::string_view whole = pickle.name(node);
  return pickle.is(node, PickleKind::object) && whole.starts_with(dcp_module) &&
         whole.substr(dcp_module.size()) == name;
}

std::span<const Pickle::Ref> pairs_of(const Pickle& pickle, Pickle::Ref node, std::string_view name) {
  const Pickle::Ref dict = pickle.member(node, name);
  if (!pickle.is(dict, PickleKind::dict)) refuse_foreign(fmt::format("its {} is no dict", name));
  return pickle.items(dict);
}

/// Returns the torch.dtype among the properties, which are a tuple that begins with it, or an object with it as a
/// member.
DType dtype_of(const Pickle& pickle, Pickle::Ref properties) {
  Pickle::Ref dtype = properties;
  if (const auto state = pickle.state(properties)) {
    const std::span<const Pickle::Ref> items = pickle.items(*state);
    if (pickle.is(*state, PickleKind::tuple) && !items.empty()) dtype = items[0];
    if (const auto named = pickle.find(properties, "dtype")) dtype = *named;
  }
  const std::optional<DType> known = dtype_of_torch(pickle.name(dtype));
  if (!known)
    refuse_foreign(fmt::format("its dtype {} is not read", in_quotes(pickle.name(dtype))), ErrorKind::unsupported);
  return *known;
}

}  // namespace

void DcpMetadata::add_tensor(const Pickle& pickle, std::string_view name, Pickle::Ref node) {
  if (!is_dcp(pickle, node, "TensorStorageMetadata")) return;  // bytes, which are never unpickled
  DcpTensor tensor;
  tensor.name = name;
  try {
    tensor.dtype = dtype_of(pickle, pickle.member(node, "properties"));
    tensor.shape = shape_of(pickle, pickle.member(node, "size"));
    const auto [number, is_new] = numbers_.try_emplace(tensor.name, tensors_.size());
    if (is_new) {
      tensors_.push_back(tensor);
      places_.emplace_back();
    }
    DcpTensor& there = tensors_[number->second];
    if (there.dtype != tensor.dtype || there.shape != tensor.shape)
      refuse_foreign("two ranks say different things of it");
    for (const Pickle::Ref chunk : pickle.items(pickle.member(node, "chunks"))) {
      DcpChunk part{.begin = shape_of(pickle, pickle.member(chunk, "offsets")),
                    .extents = shape_of(pickle, pickle.member(chunk, "sizes"))};
      if (std::ranges::find(part.extents, 0) == part.extents.end()) there.chunks.push_back(std::move(part));
    }
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("tensor {}: {}", in_quotes(name), error.what()));
  }
}

void DcpMetadata::add_place(const Pickle& pickle, Pickle::Ref key, Pickle::Ref value) {
  const std::string name(pickle.text(pickle.member(key, "fqn")));
  const auto number = numbers_.find(name);
  if (number == numbers_.end()) return;
  try {
    const std::string file(pickle.text(pickle.member(value, "relative_path")));
    const auto at = pickle.count(pickle.member(value, "offset"));
    const auto bytes = pickle.count(pickle.member(value, "length"));
    if (!is_name_beside(file)) refuse_foreign(fmt::format("its file {} is not beside it", in_quotes(file)));
    if (!at || !bytes) refuse_foreign("its place in a file is no number");
    DcpChunk place;
    if (const auto transforms = pickle.find(value, "transform_descriptors"))
      for (const Pickle::Ref transform : pickle.items(*transforms)) {
        if (pickle.text(transform) != "stream.zstd/1" || place.is_zstd)
          refuse_foreign(fmt::format("it is stored through {}, which is not read: save it without extensions",
                                     in_quotes(pickle.text(transform))),
                         ErrorKind::unsupported);
        place.is_zstd = true;
      }
    place.at = *at;
    place.bytes = *bytes;
    place.metadata = added_;
    if (const Pickle::Ref offset = pickle.member(key, "offset"); !pickle.is(offset, PickleKind::none))
      place.begin = shape_of(pickle, offset);
    const auto [known, is_new] = file_numbers_.try_emplace(file, static_cast<std::uint32_t>(files_.size()));
    if (is_new) files_.push_back(file);
    place.file = known->second;
    places_[number->second].push_back(std::move(place));
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("tensor {}: {}", in_quotes(name), error.what()));
  }
}

void DcpMetadata::add(std::span<const std::byte> bytes) {
  const Pickle pickle = Pickle::parse(bytes);
  if (!is_dcp(pickle, pickle.root(), "Metadata")) refuse_foreign("it is no Metadata of torch.distributed.checkpoint");
  const std::span<const Pickle::Ref> tensors = pairs_of(pickle, pickle.root(), "state_dict_metadata");
  for (std::size_t i = 0; i + 1 < tensors.size(); i += 2)
    if (pickle.is(tensors[i], PickleKind::text)) add_tensor(pickle, pickle.text(tensors[i]), tensors[i + 1]);
  // Megatron adds this when it cuts tensors of its optimizer along all dimensions as one.
  if (const auto dict = pickle.find(pickle.root(), "mcore_data"); dict && pickle.is(*dict, PickleKind::dict)) {
    const std::span<const Pickle::Ref> added = pickle.items(*dict);
    for (std::size_t i = 0; i + 1 < added.size(); i += 2)
      if (const auto number = numbers_.find(std::string(pickle.text(added[i]))); number != numbers_.end())
        tensors_[number->second].is_flattened |=
            pickle.find(added[i + 1], "nd_reformulated_orig_global_shape").has_value();
  }
  const std::span<const Pickle::Ref> places = pairs_of(pickle, pickle.root(), "storage_data");
  for (std::size_t i = 0; i + 1 < places.size(); i += 2) add_place(pickle, places[i], places[i + 1]);
  ++added_;
}

void DcpMetadata::finish() {
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    DcpTensor& tensor = tensors_[i];
    std::vector<DcpChunk>& places = places_[i];
    std::ranges::stable_sort(places, {}, &DcpChunk::begin);
    const auto twice = std::ranges::adjacent_find(
        places, {}, [](const DcpChunk& place) { return std::tie(place.begin, place.metadata); });
    const auto refuse = [&](std::string_view words, const Shape& begin) {
      refuse_foreign(fmt::format("tensor {}: its part at {} {}", in_quotes(tensor.name), to_string(begin), words));
    };
    if (twice != places.end()) refuse("is stored twice", twice->begin);
    // Ranks that save independently store a replica each: the first rank's is used.
    const auto box = [](const DcpChunk& chunk) { return std::tie(chunk.begin, chunk.extents); };
    std::ranges::sort(tensor.chunks, {}, box);
    const auto are_replicas = [&](const DcpChunk& one, const DcpChunk& other) { return box(one) == box(other); };
    tensor.chunks.erase(std::unique(tensor.chunks.begin(), tensor.chunks.end(), are_replicas), tensor.chunks.end());
    for (DcpChunk& chunk : tensor.chunks) {
      const auto place = std::ranges::lower_bound(places, chunk.begin, {}, &DcpChunk::begin);
      if (place == places.end() || place->begin != chunk.begin) refuse("is not stored", chunk.begin);
      chunk.file = place->file;
      chunk.at = place->at;
      chunk.bytes = place->bytes;
      chunk.is_zstd = place->is_zstd;
    }
    places = {};
  }
}

}  // namespace muster::foreign
