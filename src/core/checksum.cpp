// SPDX-License-Identifier: Apache-2.0
#include "src/core/checksum.hpp"

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>

#include "src/os/file.hpp"

namespace muster {
namespace {

constexpr std::size_t piece_bytes = std::size_t{8} << 20;
// For smaller pieces, populating their pages in one call, or dropping them, is not worth a system call.
constexpr std::size_t least_populated = std::size_t{1} << 20;
constexpr std::size_t least_forgotten = std::size_t{64} << 10;

}  // namespace

struct TensorChecksum::State {
  XXH3_state_t xxh3;
};

TensorChecksum::TensorChecksum() : state_(std::make_unique<State>()) {
  XXH3_64bits_reset(&state_->xxh3);
}
TensorChecksum::TensorChecksum(TensorChecksum&&) noexcept = default;
TensorChecksum& TensorChecksum::operator=(TensorChecksum&&) noexcept = default;
TensorChecksum::~TensorChecksum() = default;

void TensorChecksum::add(std::span<const std::byte> bytes) {
  if (!bytes.empty()) XXH3_64bits_update(&state_->xxh3, bytes.data(), bytes.size());
}

std::uint64_t TensorChecksum::value() const {
  return XXH3_64bits_digest(&state_->xxh3);
}

std::uint64_t tensor_checksum(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

std::uint64_t mapped_checksum(std::span<const std::byte> bytes, const std::string& path,
                              const std::function<void(std::uint64_t)>& done) {
  TensorChecksum checksum;
  for (std::size_t at = 0; at < bytes.size(); at += piece_bytes) {
    const std::span<const std::byte> piece = bytes.subspan(at, std::min(piece_bytes, bytes.size() - at));
    if (piece.size() >= least_populated) os::populate_mapped(piece, path);
    checksum.add(piece);
    if (piece.size() >= least_forgotten) os::forget_mapped(piece);
    if (done) done(piece.size());
  }
  return checksum.value();
}

std::string checksum_text(std::uint64_t checksum) {
  return fmt::format("{:016x}", checksum);
}

}  // namespace muster
