// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <unordered_map>

#include "muster/error.hpp"
#include "muster/safetensors.hpp"
#include "src/checkpoint/safetensors_header.hpp"
#include "src/core/quoted.hpp"
#include "src/os/publish.hpp"

namespace muster {

struct SafetensorsFile::Contents {
  explicit Contents(os::ReadableFile opened) : file(std::move(opened)) {}
  os::ReadableFile file;
  std::shared_ptr<const os::MappedFile> mapping;  // none of files that others may shorten
  SafetensorsHeader header;
  std::unordered_map<std::string_view, std::size_t> index;  // keys are the entries' own names
};

namespace {

SafetensorsHeader read_header(const os::ReadableFile& file) {
  std::array<std::byte, safetensors_prefix> prefix{};
  const std::span<std::byte> there = std::span(prefix).first(std::min(safetensors_prefix, file.bytes()));
  file.read_at(0, there);
  std::uint64_t length = 0;
  std::memcpy(&length, prefix.data(), prefix.size());
  const std::uint64_t head = std::min(file.bytes(), safetensors_prefix + std::min(length, max_safetensors_header));
  const auto memory = std::make_unique_for_overwrite<std::byte[]>(head);
  const std::span<std::byte> bytes(memory.get(), head);
  file.read_at(0, bytes);
  return parse_safetensors_header(bytes, file.bytes(), file.path());
}

}  // namespace

SafetensorsFile::SafetensorsFile(std::shared_ptr<const Contents> contents) noexcept : contents_(std::move(contents)) {}

SafetensorsFile SafetensorsFile::open(const std::string& path) {
  auto contents = std::make_shared<Contents>(os::ReadableFile::open(path));
  contents->header = read_header(contents->file);
  if (!contents->file.is_remote()) contents->mapping = contents->file.map();
  const std::vector<TensorEntry>& tensors = contents->header.tensors;
  contents->index.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) contents->index.emplace(tensors[i].name, i);
  return SafetensorsFile(std::move(contents));
}

const std::string& SafetensorsFile::path() const noexcept {
  return contents_->file.path();
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

bool SafetensorsFile::is_mapped() const noexcept {
  return contents_->mapping != nullptr;
}

Tensor SafetensorsFile::tensor(std::size_t index) const {
  if (index >= tensors().size())
    throw Error(ErrorKind::not_found,
                fmt::format("reading {}: it has {} tensors, no number {}", in_quotes(path()), tensors().size(), index),
                {.path = path()});
  const TensorEntry& entry = tensors()[index];
  if (contents_->mapping) {
    const std::byte* data = contents_->mapping->bytes().data() + entry.offset;
    return {TensorView(entry.dtype, entry.shape, data), contents_->mapping};
  }
  Tensor tensor = Tensor::allocate(entry.dtype, entry.shape);
  read(index, 0, {tensor.mutable_data(), tensor.nbytes()});
  return tensor;
}

void SafetensorsFile::read(std::size_t index, std::uint64_t offset, std::span<std::byte> target) const {
  if (index >= tensors().size() || offset > tensors()[index].bytes || target.size() > tensors()[index].bytes - offset)
    throw Error(ErrorKind::argument,
                fmt::format("reading {}: {} bytes at {} of tensor number {} are not there", in_quotes(path()),
                            target.size(), offset, index),
                {.path = path()});
  contents_->file.read_at(tensors()[index].offset + offset, target);
}

Tensor SafetensorsFile::tensor(std::string_view name) const {
  const std::optional<std::size_t> index = find(name);
  if (!index)
    throw Error(ErrorKind::not_found,
                fmt::format("reading {}: it has no tensor {}", in_quotes(path()), in_quotes(name)), {.path = path()});
  return tensor(*index);
}

struct SafetensorsWriter::State {
  State(const std::string& path, std::vector<TensorEntry> announced, std::map<std::string, std::string> metadata)
      : tensors(std::move(announced)),
        header(make_safetensors_header(tensors, std::move(metadata), path)),
        written(tensors.size()),
        file(path) {
    index.reserve(tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) index.emplace(tensors[i].name, i);
    file.reserve(tensors.empty() ? header.size() : tensors.back().offset + tensors.back().bytes);
  }

  std::size_t place(std::string_view name) const {
    const auto found = index.find(name);
    if (found != index.end()) return found->second;
    throw Error(ErrorKind::not_found,
                fmt::format("writing {}: the tensor {} was not announced", in_quotes(file.path()), in_quotes(name)),
                {.path = file.path()});
  }

  [[noreturn]] void refuse(const TensorEntry& entry, const std::string& what) const {
    throw Error(ErrorKind::argument,
                fmt::format("writing {}: tensor {}: {}", in_quotes(file.path()), in_quotes(entry.name), what),
                {.path = file.path()});
  }

  std::vector<TensorEntry> tensors;
  std::string header;
  std::vector<std::atomic<std::uint64_t>> written;          // bytes of each tensor so far
  std::unordered_map<std::string_view, std::size_t> index;  // keys are the entries' own names
  os::OutputFile file;
  bool is_committed = false;
};

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<TensorEntry> tensors,
                                     std::map<std::string, std::string> metadata)
    : state_(std::make_unique<State>(path, std::move(tensors), std::move(metadata))) {}
SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter& SafetensorsWriter::operator=(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter::~SafetensorsWriter() = default;

const std::vector<TensorEntry>& SafetensorsWriter::tensors() const noexcept {
  return state_->tensors;
}

void SafetensorsWriter::write(std::string_view name, std::uint64_t offset, std::span<const std::byte> bytes) {
  const std::size_t place = state_->place(name);
  const TensorEntry& entry = state_->tensors[place];
  if (offset > entry.bytes || bytes.size() > entry.bytes - offset)
    state_->refuse(entry,
                   fmt::format("{} bytes at {} are past the end of its {} bytes", bytes.size(), offset, entry.bytes));
  state_->file.write_at(entry.offset + offset, bytes);
  // Counted when they are there: what failed is missing at the end.
  state_->written[place].fetch_add(bytes.size(), std::memory_order_relaxed);
}

void SafetensorsWriter::write(std::string_view name, const TensorView& tensor) {
  const TensorEntry& entry = state_->tensors[state_->place(name)];
  if (tensor.dtype() != entry.dtype || tensor.shape() != entry.shape)
    state_->refuse(entry, fmt::format("it was announced as {} {}, not as {} {}", to_string(entry.dtype),
                                      to_string(entry.shape), to_string(tensor.dtype()), to_string(tensor.shape())));
  if (tensor.is_contiguous())
    write(name, 0, tensor.bytes());
  else
    write(name, 0, Tensor::copy_of(tensor).bytes());
}

void SafetensorsWriter::commit() {
  State& state = *state_;
  if (state.is_committed)
    throw Error(ErrorKind::argument, fmt::format("{} is finished already", in_quotes(state.file.path())),
                {.path = state.file.path()});
  for (std::size_t i = 0; i < state.tensors.size(); ++i) {
    const std::uint64_t written = state.written[i].load(std::memory_order_relaxed);
    if (written != state.tensors[i].bytes)
      state.refuse(state.tensors[i], fmt::format("{} of its {} bytes were written", written, state.tensors[i].bytes));
  }
  // Last of all: until here the file begins with zeros, which no reader takes for a header.
  state.file.write_at(0, std::as_bytes(std::span(state.header)));
  state.file.commit();
  state.is_committed = true;
}

}  // namespace muster
