// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/assembly/growing_files.hpp"

#include <fmt/format.h>

#include <map>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/formats/json_text.hpp"
#include "src/formats/safetensors.hpp"
#include "src/os/file.hpp"
#include "src/os/publish.hpp"

namespace muster {
namespace {

constexpr std::uint64_t header_space = 1 << 20;
// The size of an entry of the header without its name and extents: dtype, offsets, and the dtype of Muster's metadata.
constexpr std::uint64_t longest_entry = 256;
const std::map<std::string, std::string> metadata_of_growing = {{"format", "pt"}};

std::uint64_t bound_of(const MergedTensor& tensor) {
  // A character of a name has at most six in JSON; the name also occurs in Muster's metadata.
  return longest_entry + 12 * tensor.name.size() + 48 * tensor.layout.target.shape.size();
}

}  // namespace

GrowingFiles::File& GrowingFiles::begin_file() {
  const std::string name = fmt::format("{}/part-{:05}.safetensors", directory_, files_.size() + 1);
  FileTarget target{name, os::partial_name(name)};
  os::WritableFile::create(target.place, target.name).close();
  return files_.emplace_back(File{std::move(target), header_space, longest_entry});
}

std::vector<FileTarget> GrowingFiles::add(std::vector<MergedTensor> tensors, std::vector<OutputFile>& outputs) {
  std::vector<FileTarget> targets;
  last_.clear();
  for (MergedTensor& tensor : tensors) {
    if (!names_.insert(tensor.name).second)
      throw Error(
          ErrorKind::invalid_argument,
          fmt::format("tensor {}: it is in two units. Pass all parts of a tensor in one unit", in_quotes(tensor.name)));
    const std::uint64_t bytes = byte_size(tensor.layout.target.dtype, tensor.layout.target.shape);
    const std::uint64_t bound = bound_of(tensor);
    if (files_.empty() || files_.back().header_bytes + bound > header_space ||
        (files_.back().end != header_space && files_.back().end - header_space + bytes > max_shard_size_))
      begin_file();
    if (last_.empty() || last_.back() + 1 != files_.size()) {
      last_.push_back(files_.size() - 1);
      targets.push_back(files_.back().target);
      outputs.push_back({files_.back().target.name, {}, {}, files_.back().end});
    }
    files_.back().header_bytes += bound;
    files_.back().end += bytes;
    outputs.back().tensors.push_back(std::move(tensor));
  }
  for (const std::size_t number : last_) {
    os::WritableFile file = os::WritableFile::open(files_[number].target.place, files_[number].target.name);
    file.reserve(files_[number].end);
    file.close();
  }
  return targets;
}

void GrowingFiles::place(std::span<const FilePlan> plans) {
  for (std::size_t i = 0; i < plans.size(); ++i) {
    std::vector<TensorEntry>& tensors = files_[last_[i]].tensors;
    tensors.insert(tensors.end(), plans[i].tensors.begin(), plans[i].tensors.end());
  }
}

GrowingFiles::Finished GrowingFiles::finish(std::string_view stem) {
  if (files_.empty())
    throw Error(ErrorKind::invalid_argument,
                "export_model: no unit has a selected tensor. Pass tensors, or change select and exclude");
  Finished finished;
  std::uint64_t total = 0;
  ConfigObject map;
  for (std::size_t i = 0; i < files_.size(); ++i) {
    const File& file = files_[i];
    const std::string name =
        files_.size() == 1 ? fmt::format("{}.safetensors", stem) : numbered_name(stem, i + 1, files_.size());
    finish_file(
        {name, make_safetensors_header(file.tensors, metadata_of_growing, file.target.name, header_space), 0, {}, {}},
        {join_path(directory_, name), file.target.place});
    finished.files.push_back({name, {}, {}});
    for (const TensorEntry& entry : file.tensors) {
      total += entry.bytes;
      finished.weights.emplace_back(entry.name, name);
      map.insert(entry.name, Config(name));
    }
  }
  if (files_.size() > 1)
    finished.index = to_json(Config::object({{"metadata", Config::object({{"total_size", Config(total)}})},
                                             {"weight_map", Config(std::move(map))}}),
                             2) +
                     "\n";
  return finished;
}

}  // namespace muster
