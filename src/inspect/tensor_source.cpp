// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/tensor_source.hpp"

#include <fmt/core.h>

#include <utility>

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

MergedSource::MergedSource(MergedTensors tensors, std::map<std::string, std::string> metadata)
    : tensors_(std::move(tensors)), metadata_(std::move(metadata)) {
  for (std::size_t i = 0; i < tensors_.tensors().size(); ++i) {
    const std::string& name = tensors_.tensors()[i].name;
    if (!index_.emplace(name, i).second)
      throw Error(ErrorKind::argument, fmt::format("the tensor {} has two sources of this one name", in_quotes(name)));
  }
}

std::optional<std::size_t> MergedSource::find(std::string_view name) const noexcept {
  const auto found = index_.find(name);
  if (found == index_.end()) return std::nullopt;
  return found->second;
}

std::unique_ptr<PieceBytes> MergedSource::read(std::size_t tensor, std::uint64_t offset, std::uint64_t length) const {
  std::vector<std::byte> target(length);
  tensors_.read(tensor, offset, target);
  return std::make_unique<PieceBytes>(std::move(target));
}

TensorDetail MergedSource::detail(std::size_t tensor) const {
  TensorDetail detail{.file = tensors_.file_of(tensor)};
  for (const TensorPart& part : tensors_.parts(tensor)) detail.stored_bytes += part.bytes;
  return detail;
}

}  // namespace muster::inspect
