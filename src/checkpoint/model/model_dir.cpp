// SPDX-License-Identifier: Apache-2.0
#include "muster/model_dir.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <unordered_map>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/model/model_survey.hpp"

namespace muster {

struct ModelDir::Contents {
  std::string path;
  std::vector<SafetensorsFile> files;
  std::vector<std::size_t> first;  // index of each file's first tensor; the last entry is the number of tensors
  std::vector<TensorEntry> tensors;
  std::map<std::string, std::string> metadata;
  std::unordered_map<std::string_view, std::size_t> index;  // keys are views of the entries' names

  Omissions omissions;
  std::vector<std::string> notes;

  void join_files();
  [[nodiscard]] std::size_t file_of(std::size_t tensor) const {
    return static_cast<std::size_t>(std::upper_bound(first.begin(), first.end(), tensor) - first.begin()) - 1;
  }
};

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
  for (std::size_t i = 0; i < count; ++i) index.emplace(tensors[i].name, i);
}

ModelDir::ModelDir(std::shared_ptr<const Contents> contents) noexcept : contents_(std::move(contents)) {}

ModelDir ModelDir::open(const std::string& path) {
  auto contents = std::make_shared<Contents>();
  contents->path = path;
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) {
    contents->files.push_back(SafetensorsFile::open(path));
  } else {
    ModelSurvey survey = survey_model(path, files_in(path));
    refuse_findings(survey.findings, path);
    for (SurveyedFile& opened : survey.files) contents->files.push_back(std::move(opened.file));
    contents->omissions = std::move(survey.left_out);
    contents->notes = notes_of(survey.findings);
  }
  contents->join_files();
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
                     fmt::format("tensor index {1} is out of range for {0} tensors", tensors().size(), index));
  return contents_->files[contents_->file_of(index)];
}

const std::map<std::string, std::string>& ModelDir::metadata() const noexcept {
  return contents_->metadata;
}

const Omissions& ModelDir::omissions() const noexcept {
  return contents_->omissions;
}

const std::vector<std::string>& ModelDir::notes() const noexcept {
  return contents_->notes;
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
