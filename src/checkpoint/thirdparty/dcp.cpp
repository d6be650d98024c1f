// SPDX-License-Identifier: Apache-2.0
// Each part of a tensor is a complete torch.save archive somewhere in a file. The offset of its elements in the archive
// is determined when it is first read.
//
// torch can write safetensors files instead. Their offsets in .metadata are wrong. A part in them is found by its name,
// and its position in the tensor is in the file's own metadata.

#include "src/checkpoint/thirdparty/dcp.hpp"
#include <fmt/core.h>
#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include "muster/config.hpp"
#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/thirdparty/torch_archive.hpp"
#include "src/checkpoint/thirdparty/torch_weights.hpp"
#include "src/formats/file_kind.hpp"
#include "src/formats/json_text.hpp"
#include "src/formats/safetensors.hpp"
#include "src/merge/boxes.hpp"
#include "src/os/process.hpp"

namespace muster::thirdparty {
namespace {

constexpr std::uint64_t longest_metadata = std::uint64_t{1} << 30;
constexpr std::uint64_t longest_facts = std::uint64_t{1} << 24;

/// A part of a tensor in a safetensors file.
struct DcpPiece {
  Shape begin;
  TensorSpec spec;
  BoxPlace place;
};
using DcpPieces = std::map<std::string, std::vector<DcpPiece>, std::less<>>;

BoxPlace locate_item(const formats::ReadAt& read, std::uint64_t bytes, DType dtype, const Shape& extents) {
  const TorchArchive archive = TorchArchive::open_zip(read, bytes);
  const TorchTensor tensor = archive.tensor(archive.pickle().root());
  if (tensor.dtype != dtype || box_extents(tensor.shape) != extents)
    throw Error(ErrorKind::corrupt,
                fmt::format("expected {1}, found {0}", to_string(TensorSpec{tensor.dtype, tensor.shape}),
                            to_string(TensorSpec{dtype, extents})));
  return tensor.place_in(0);
}

/// A part is stored without the rest of the tensor from which it was cut, in an archive that adds some kB.
std::uint64_t most_unpacked(DType dtype, const Shape& extents) {
  constexpr std::uint64_t archive_bytes = 1 << 20;
  return byte_size(dtype, extents) + archive_bytes;
}

/// Checks the format, which Megatron records in a separate file.
void check_backend(const std::string& directory) {
  const std::string path = join_path(directory, "metadata.json");
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return;
  const Config json =
      with_file("reading", path, [&] { return core::parse_tolerantly(read_text(path, longest_facts)); });
  const Config* backend = json.is_object() ? json.find("sharded_backend") : nullptr;
  if (backend != nullptr && backend->is_string() && backend->as_string() != "torch_dist")
    throw file_error(
        ErrorKind::unsupported, "reading", path,
        fmt::format("unsupported sharded_backend {} (expected torch_dist)", in_quotes(backend->as_string())));
}

/// Returns the positions of tensors that torch recorded in the safetensors files of a save.
std::map<std::string, Shape> saved_offsets(const SafetensorsHeader& header) {
  const auto text = header.metadata.find("DCP_SHARDING_INFO");
  if (text == header.metadata.end())
    throw Error(ErrorKind::corrupt, "malformed metadata: DCP_SHARDING_INFO is missing");
  std::map<std::string, Shape> offsets;
  const Config json = core::parse_tolerantly(text->second);
  for (const auto& [name, info] : json.as_object()) {
    Shape& begin = offsets[name];  // the offsets of a scalar are empty
    for (const Config& offset : info.at("saved_offsets").as_array()) begin.push_back(offset.as_int());
  }
  return offsets;
}

/// Adds the parts in a safetensors file, or in one that follows other items of a save in the same file.
void add_safetensors(DcpPieces& pieces, const PartedTensors& tensors, std::uint32_t number, std::uint64_t begin) {
  const os::ReadableFile& file = tensors.file(number);
  with_file("reading", file.path(), [&] {
    const SafetensorsHeader header = read_safetensors_header(file, begin);
    const std::map<std::string, Shape> offsets = saved_offsets(header);
    for (const TensorEntry& entry : header.tensors) {
      const auto at = offsets.find(entry.name);
      if (at == offsets.end() || at->second.size() != entry.shape.size())
        throw Error(ErrorKind::corrupt,
                    fmt::format("tensor {}: its offsets in the whole tensor are missing", in_quotes(entry.name)));
      pieces[entry.name].push_back({at->second, {entry.dtype, entry.shape}, {number, begin + entry.offset, {}}});
    }
  });
}

std::int64_t add_extents(std::int64_t a, std::int64_t b) {
  std::int64_t sum = 0;
  if (a < 0 || __builtin_add_overflow(a, b, &sum))
    throw Error(ErrorKind::corrupt, "the offset of a part is out of range");
  return sum;
}

/// Ranks that do not deduplicate replicas store one each: the first rank's is used.
void add_pieces(PartedTensors& tensors, std::vector<DcpPiece> pieces) {
  const auto box = [](const DcpPiece& piece) { return std::tie(piece.begin, piece.spec.shape); };
  std::ranges::stable_sort(pieces, {}, box);
  const auto are_replicas = [&](const DcpPiece& one, const DcpPiece& other) { return box(one) == box(other); };
  pieces.erase(std::unique(pieces.begin(), pieces.end(), are_replicas), pieces.end());
  for (const DcpPiece& piece : pieces) {
    const Shape extents = box_extents(piece.spec.shape);
    if (piece.spec.dtype != tensors.tensors().back().dtype)
      throw Error(ErrorKind::corrupt,
                  fmt::format("tensor {}: its parts have different dtypes", in_quotes(tensors.tensors().back().name)));
    tensors.add_box(piece.spec.shape.empty() ? Shape{0} : piece.begin, extents,
                    BoxPlace{piece.place.file, piece.place.begin, merge::row_major_strides(extents)});
  }
}

/// Returns the name without the selected prefix; nullopt if the name does not have it.
std::optional<std::string> name_below(const std::string& name, const std::string& at) {
  if (at.empty()) return name;
  if (!name.starts_with(at) || name.size() <= at.size() + 1 || name[at.size()] != '.') return std::nullopt;
  return name.substr(at.size() + 1);
}

std::string first_words(const std::vector<DcpTensor>& tensors) {
  std::map<std::string, std::size_t> words;
  for (const DcpTensor& tensor : tensors) ++words[tensor.name.substr(0, tensor.name.find('.'))];
  std::string text;
  for (const auto& [word, count] : words) text += (text.empty() ? "" : ", ") + in_quotes(word);
  return text.empty() ? "none" : text;
}

}  // namespace

std::vector<std::string> dcp_metadata_files(const std::vector<std::string>& names) {
  if (std::ranges::find(names, ".metadata") != names.end()) return {".metadata"};
  std::vector<std::string> files;
  for (const std::string& name : names)
    if (name.starts_with("__") && name.ends_with(".metadata")) files.push_back(name);
  return files;
}

std::shared_ptr<const PartedTensors> open_dcp(const FoundCheckpoint& found, const Choice& choice,
                                              std::vector<std::string>& notes) {
  check_backend(found.path);
  DcpMetadata metadata;
  for (const std::string& name : found.files) {
    const std::string path = join_path(found.path, name);
    with_file("reading", path, [&] { metadata.add(os::read_small_file(path, longest_metadata)); });
  }
  const std::string& path = found.path;
  return with_file("reading", path, [&] {
    metadata.finish();
    auto tensors = std::make_shared<PartedTensors>(locate_item);
    os::allow_open_files(metadata.files().size() + 256);
    std::vector<std::uint32_t> files;
    for (const std::string& name : metadata.files()) files.push_back(tensors->add_file(join_path(path, name)));
    DcpPieces pieces;
    std::set<std::uint32_t> looked_at;
    for (const DcpTensor& tensor : metadata.tensors())
      for (const DcpChunk& chunk : tensor.chunks)
        if (!chunk.is_zstd && looked_at.insert(chunk.file).second &&
            formats::kind_of_file(tensors->file(files[chunk.file]), chunk.at) == formats::FileKind::safetensors)
          add_safetensors(pieces, *tensors, files[chunk.file], chunk.at);
    std::size_t flattened = 0;
    for (const DcpTensor& tensor : metadata.tensors()) {
      const std::optional<std::string> name = name_below(tensor.name, choice.key);
      if (!name) continue;
      if (tensor.is_flattened && tensor.name.starts_with("optim")) {
        ++flattened;
        continue;
      }
      if (tensor.is_flattened)
        throw Error(ErrorKind::unsupported, fmt::format("tensor {}: Megatron split it with flattened_range, which "
                                                        "Muster cannot read. Save it with a newer Megatron",
                                                        in_quotes(tensor.name)));
      tensors->add_tensor(*name, tensor.dtype, tensor.shape);
      if (const auto found_pieces = pieces.find(tensor.name); found_pieces != pieces.end()) {
        add_pieces(*tensors, found_pieces->second);
        continue;
      }
      const bool is_scalar = tensor.shape.empty();
      for (const DcpChunk& chunk : tensor.chunks)
        tensors->add_box(is_scalar ? Shape{0} : chunk.begin, is_scalar ? Shape{1} : chunk.extents,
                         BoxItem{files[chunk.file], chunk.at, chunk.bytes,
                                 chunk.is_zstd ? most_unpacked(tensor.dtype, chunk.extents) : 0});
    }
    if (flattened != 0)
      notes.push_back(fmt::format(
          "{} tensors of the optimizer are left out: they are split with flattened_range, which Muster cannot read",
          flattened));
    if (tensors->tensors().empty())
      throw Error(ErrorKind::not_found, choice.key.empty()
                                            ? std::string("the checkpoint has no tensors")
                                            : fmt::format("no tensor has the key {} (available: {})",
                                                          in_quotes(choice.key), first_words(metadata.tensors())));
    if (choice.key.empty() && std::ranges::any_of(tensors->tensors(), [](const TensorEntry& entry) {
          return entry.name.starts_with("optim");
        }))
      notes.push_back(fmt::format("it also has the state of an optimizer. Choose other tensors with --key: {}",
                                  first_words(metadata.tensors())));
    tensors->finish();
    return tensors;
  });
}

std::shared_ptr<const PartedTensors> open_dcp_shards(const FoundCheckpoint& found) {
  auto tensors = std::make_shared<PartedTensors>();
  os::allow_open_files(found.files.size() + 256);
  DcpPieces pieces;
  for (const std::string& name : found.files)
    add_safetensors(pieces, *tensors, tensors->add_file(join_path(found.path, name)), 0);
  with_file("reading", found.path, [&] {
    for (const auto& [name, parts] : pieces) {
      // The size of the whole tensor is not recorded.
      Shape shape(parts.front().begin.size(), 0);
      for (const DcpPiece& piece : parts)
        for (std::size_t i = 0; i < shape.size() && i < piece.begin.size(); ++i)
          shape[i] = std::max(shape[i], add_extents(piece.begin[i], piece.spec.shape[i]));
      tensors->add_tensor(name, parts.front().spec.dtype, shape);
      add_pieces(*tensors, parts);
    }
    tensors->finish();
  });
  return tensors;
}

// The relevant parts of the metadata:
//
//   state_dict_metadata {name: TensorStorageMetadata{properties, size, chunks [{offsets, sizes}]} | bytes}
//   mcore_data {name: {nd_reformulated_orig_global_shape}}, Megatron only
//   storage_data {MetadataIndex{fqn, offset}: _StorageInfo{relative_path, offset, length, transform_descriptors}}
//
// A chunk is identified by its tensor's name and its offsets; neither list is sorted.
namespace {

constexpr std::string_view dcp_module = "torch.distributed.checkpoint.metadata.";

bool is_dcp(const Pickle& pickle, Pickle::Ref node, std::string_view name) {
  const std::string_view whole = pickle.name(node);
  return pickle.is(node, PickleKind::object) && whole.starts_with(dcp_module) &&
         whole.substr(dcp_module.size()) == name;
}

std::span<const Pickle::Ref> pairs_of(const Pickle& pickle, Pickle::Ref node, std::string_view name) {
  const Pickle::Ref dict = pickle.member(node, name);
  if (!pickle.is(dict, PickleKind::dict)) refuse_foreign(fmt::format("{} is not a dict", name));
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
    refuse_foreign(fmt::format("unsupported dtype {}. Save the tensor in another dtype", in_quotes(pickle.name(dtype))),
                   ErrorKind::unsupported);
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
      refuse_foreign("two ranks record different shapes or dtypes");
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
    if (!is_name_beside(file)) refuse_foreign(fmt::format("its file {} is not in the same directory", in_quotes(file)));
    if (!at || !bytes) refuse_foreign("its offset in a file is not a number");
    DcpChunk place;
    if (const auto transforms = pickle.find(value, "transform_descriptors"))
      for (const Pickle::Ref transform : pickle.items(*transforms)) {
        if (pickle.text(transform) != "stream.zstd/1" || place.is_zstd)
          refuse_foreign(fmt::format("it is stored with {}, which Muster cannot read. Save it without extensions",
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
  if (!is_dcp(pickle, pickle.root(), "Metadata"))
    refuse_foreign("not a Metadata object of torch.distributed.checkpoint");
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

}  // namespace muster::thirdparty
