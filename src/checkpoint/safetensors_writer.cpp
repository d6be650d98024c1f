// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <atomic>
#include <unordered_map>

#include "muster/error.hpp"
#include "muster/safetensors.hpp"
#include "src/checkpoint/safetensors_header.hpp"
#include "src/core/quoted.hpp"
#include "src/os/publish.hpp"

namespace muster {

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
