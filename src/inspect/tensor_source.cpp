// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/tensor_source.hpp"

#include <fmt/core.h>

#include <set>

#include "muster/error.hpp"
#include "src/core/quoted.hpp"
#include "src/os/file.hpp"

namespace muster::inspect {
namespace {

// What is smaller is not worth a system call to be given back.
constexpr std::size_t least_forgotten = std::size_t{64} << 10;

}  // namespace

PieceBytes::~PieceBytes() {
  if (is_mapped_ && bytes_.size() >= least_forgotten) os::forget_mapped(bytes_);
}

MergedSource::MergedSource(std::vector<MergedTensor> tensors, std::map<std::string, std::string> metadata)
    : tensors_(std::move(tensors)), metadata_(std::move(metadata)) {
  rows_.reserve(tensors_.size());
  entries_.reserve(tensors_.size());
  for (const MergedTensor& tensor : tensors_) {
    rows_.push_back(merge::rows_of(tensor.layout));
    const TensorSpec& spec = tensor.layout.target;
    entries_.push_back({tensor.name, spec.dtype, spec.shape, 0, byte_size(spec.dtype, spec.shape)});
  }
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (!index_.emplace(entries_[i].name, i).second)
      throw Error(ErrorKind::argument,
                  fmt::format("the tensor {} has two sources of this one name", in_quotes(entries_[i].name)));
  }
}

std::optional<std::size_t> MergedSource::find(std::string_view name) const noexcept {
  const auto found = index_.find(name);
  if (found == index_.end()) return std::nullopt;
  return found->second;
}

std::unique_ptr<PieceBytes> MergedSource::read(std::size_t tensor, std::uint64_t offset, std::uint64_t length) const {
  std::vector<std::byte> target(length);
  read_merged(tensors_[tensor], rows_[tensor], offset, target);
  return std::make_unique<PieceBytes>(std::move(target));
}

TensorDetail MergedSource::detail(std::size_t tensor) const {
  const MergedTensor& merged = tensors_[tensor];
  TensorDetail detail;
  std::set<std::string_view> files;
  for (const AssemblySource& source : merged.sources) {
    detail.stored_bytes += source.bytes;
    files.insert(source.file);
  }
  if (files.size() == 1) detail.file = *files.begin();
  return detail;
}

}  // namespace muster::inspect
