// SPDX-License-Identifier: Apache-2.0
// Which files are a model:
//
//  1. One index (*.safetensors.index.json; model.safetensors.index.json before others): the files it names. Every
//     tensor must be where it says, and every tensor of these files must be in it.
//  2. Else model.safetensors.
//  3. Else every *.safetensors, and no name may be in two.

#include "muster/model_dir.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <unordered_map>

#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/model_files.hpp"
#include "src/os/process.hpp"

namespace muster {
namespace {

namespace fs = std::filesystem;

// That a process has open beside a model's.
constexpr std::uint64_t other_files = 256;

std::string choose_index(const std::string& directory, std::vector<std::string> indexes) {
  if (indexes.empty()) return {};
  if (std::find(indexes.begin(), indexes.end(), model_index_name) != indexes.end())
    return std::string(model_index_name);
  if (indexes.size() > 1)
    throw file_error(
        ErrorKind::argument, "reading", directory,
        fmt::format("{} and {} are both an index; move one away", in_quotes(indexes[0]), in_quotes(indexes[1])));
  return std::move(indexes[0]);
}

}  // namespace

struct ModelDir::Contents {
  std::string path;
  std::vector<SafetensorsFile> files;
  std::vector<std::size_t> first;  // of each file, in tensors; and their number at the end
  std::vector<TensorEntry> tensors;
  std::map<std::string, std::string> metadata;
  std::unordered_map<std::string_view, std::size_t> index;  // keys are the entries' own names

  void open_directory();
  void open_indexed(const std::string& index_path, const WeightMap& weights);
  void join_files();
  [[nodiscard]] std::size_t file_of(std::size_t tensor) const {
    return static_cast<std::size_t>(std::upper_bound(first.begin(), first.end(), tensor) - first.begin()) - 1;
  }
};

void ModelDir::Contents::open_directory() {
  std::vector<std::string> names;
  std::vector<std::string> indexes;
  for (std::string& name : files_in(path)) {
    if (is_weight_name(name))
      names.push_back(std::move(name));
    else if (is_index_name(name))
      indexes.push_back(std::move(name));
  }
  const std::string index_name = choose_index(path, std::move(indexes));
  const bool has_single = std::binary_search(names.begin(), names.end(), model_file_name);
  if (!index_name.empty()) {
    const std::string index_path = join_path(path, index_name);
    const WeightMap weights = read_weight_map(index_path);
    const bool names_single = std::any_of(weights.begin(), weights.end(),
                                          [](const auto& weight) { return weight.second == model_file_name; });
    if (has_single && index_name == model_index_name && !names_single)
      throw file_error(
          ErrorKind::argument, "reading", path,
          fmt::format("both {} and the files of {} are there, two models; move one away", model_file_name, index_name));
    open_indexed(index_path, weights);
    return;
  }
  if (has_single) names = {std::string(model_file_name)};
  if (names.empty()) throw file_error(ErrorKind::not_found, "reading", path, "there is no *.safetensors in it");
  if (names.size() > 1 && parse_shard_file_name(names.front()))
    throw file_error(ErrorKind::argument, "reading", path,
                     "it has the shards of ranks, not a model; muster export makes one of them, or name one file");
  os::allow_open_files(names.size() + other_files);
  for (const std::string& name : names) files.push_back(SafetensorsFile::open(join_path(path, name)));
  join_files();
}

void ModelDir::Contents::open_indexed(const std::string& index_path, const WeightMap& weights) {
  const auto refuse = [&](ErrorKind kind, const std::string& what) {
    throw file_error(kind, "reading the index", index_path, what);
  };
  std::vector<std::string> names;
  for (const auto& weight : weights) {
    if (names.empty() || names.back() != weight.second) names.push_back(weight.second);
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  os::allow_open_files(names.size() + other_files);
  for (const std::string& name : names) {
    const std::string file_path = join_path(path, name);
    std::error_code error;
    if (!fs::exists(file_path, error))
      refuse(ErrorKind::not_found, fmt::format("it names {}, which is not there", in_quotes(name)));
    files.push_back(SafetensorsFile::open(file_path));
  }
  join_files();
  for (const auto& [name, file_name] : weights) {
    const auto found = index.find(name);
    if (found == index.end() || fs::path(files[file_of(found->second)].path()).filename() != file_name)
      refuse(ErrorKind::corrupt,
             fmt::format("it puts tensor {} into {}, which does not have it", in_quotes(name), in_quotes(file_name)));
  }
  if (tensors.size() == weights.size()) return;
  std::unordered_map<std::string_view, std::string_view> indexed(weights.begin(), weights.end());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!indexed.contains(tensors[i].name))
      refuse(ErrorKind::corrupt, fmt::format("it lacks tensor {}, which {} has", in_quotes(tensors[i].name),
                                             in_quotes(files[file_of(i)].path())));
  }
}

void ModelDir::Contents::join_files() {
  std::size_t count = 0;
  for (const SafetensorsFile& file : files) {
    first.push_back(count);
    count += file.tensors().size();
  }
  first.push_back(count);
  tensors.reserve(count);
  index.reserve(count);
  for (const SafetensorsFile& file : files) {
    tensors.insert(tensors.end(), file.tensors().begin(), file.tensors().end());
    metadata.insert(file.metadata().begin(), file.metadata().end());
  }
  for (std::size_t i = 0; i < count; ++i) {
    const auto [other, is_new] = index.emplace(tensors[i].name, i);
    if (!is_new)
      throw file_error(
          ErrorKind::corrupt, "reading", path,
          fmt::format("tensor {} is there twice, in {} and in {}; if ranks have written them, name a plan, and their "
                      "files by a pattern (--shards 'rank{{rank}}.safetensors')",
                      in_quotes(tensors[i].name), in_quotes(files[file_of(other->second)].path()),
                      in_quotes(files[file_of(i)].path())));
  }
}

ModelDir::ModelDir(std::shared_ptr<const Contents> contents) noexcept : contents_(std::move(contents)) {}

ModelDir ModelDir::open(const std::string& path) {
  auto contents = std::make_shared<Contents>();
  contents->path = path;
  std::error_code error;
  if (fs::is_directory(path, error)) {
    contents->open_directory();
  } else {
    contents->files.push_back(SafetensorsFile::open(path));
    contents->join_files();
  }
  return ModelDir(std::move(contents));
}

const std::string& ModelDir::path() const noexcept {
  return contents_->path;
}

const std::vector<TensorEntry>& ModelDir::tensors() const noexcept {
  return contents_->tensors;
}

const std::vector<SafetensorsFile>& ModelDir::files() const noexcept {
  return contents_->files;
}

const SafetensorsFile& ModelDir::file_of(std::size_t index) const {
  if (index >= tensors().size())
    throw file_error(ErrorKind::not_found, "reading", path(),
                     fmt::format("it has {} tensors, no number {}", tensors().size(), index));
  return contents_->files[contents_->file_of(index)];
}

const std::map<std::string, std::string>& ModelDir::metadata() const noexcept {
  return contents_->metadata;
}

std::optional<std::size_t> ModelDir::find(std::string_view name) const noexcept {
  const auto found = contents_->index.find(name);
  if (found == contents_->index.end()) return std::nullopt;
  return found->second;
}

void ModelDir::read(std::size_t index, std::uint64_t offset, std::span<std::byte> target) const {
  const SafetensorsFile& file = file_of(index);
  file.read(index - contents_->first[contents_->file_of(index)], offset, target);
}

Tensor ModelDir::tensor(std::size_t index) const {
  const SafetensorsFile& file = file_of(index);
  return file.tensor(index - contents_->first[contents_->file_of(index)]);
}

}  // namespace muster
