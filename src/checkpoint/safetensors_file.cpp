// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <unordered_map>

#include "muster/error.hpp"
#include "muster/safetensors.hpp"
#include "src/checkpoint/safetensors_header.hpp"
#include "src/core/quoted.hpp"
#include "src/os/file.hpp"

namespace muster {

struct SafetensorsFile::Contents {
  std::shared_ptr<const os::MappedFile> mapping;
  SafetensorsHeader header;
  std::unordered_map<std::string_view, std::size_t> index;  // keys are the entries' own names
};

SafetensorsFile::SafetensorsFile(std::shared_ptr<const Contents> contents) noexcept : contents_(std::move(contents)) {}

SafetensorsFile SafetensorsFile::open(const std::string& path) {
  auto contents = std::make_shared<Contents>();
  contents->mapping = os::MappedFile::open(path);
  const std::span<const std::byte> bytes = contents->mapping->bytes();
  contents->header = parse_safetensors_header(bytes, bytes.size(), path);
  const std::vector<TensorEntry>& tensors = contents->header.tensors;
  contents->index.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) contents->index.emplace(tensors[i].name, i);
  return SafetensorsFile(std::move(contents));
}

const std::string& SafetensorsFile::path() const noexcept {
  return contents_->mapping->path();
}

const std::vector<TensorEntry>& SafetensorsFile::tensors() const noexcept {
  return contents_->header.tensors;
}

const std::map<std::string, std::string>& SafetensorsFile::metadata() const noexcept {
  return contents_->header.metadata;
}

std::optional<std::size_t> SafetensorsFile::find(std::string_view name) const noexcept {
  const auto found = contents_->index.find(name);
  if (found == contents_->index.end()) return std::nullopt;
  return found->second;
}

Tensor SafetensorsFile::tensor(std::size_t index) const {
  if (index >= tensors().size())
    throw Error(ErrorKind::not_found,
                fmt::format("reading {}: it has {} tensors, no number {}", in_quotes(path()), tensors().size(), index),
                {.path = path()});
  const TensorEntry& entry = tensors()[index];
  const std::byte* data = contents_->mapping->bytes().data() + entry.offset;
  return {TensorView(entry.dtype, entry.shape, data), contents_->mapping};
}

Tensor SafetensorsFile::tensor(std::string_view name) const {
  const std::optional<std::size_t> index = find(name);
  if (!index)
    throw Error(ErrorKind::not_found,
                fmt::format("reading {}: it has no tensor {}", in_quotes(path()), in_quotes(name)), {.path = path()});
  return tensor(*index);
}

}  // namespace muster
