// SPDX-License-Identifier: Apache-2.0
#include "src/versions/digest.hpp"

#include <fmt/core.h>
#include <fmt/ranges.h>
#define XXH_INLINE_ALL
#include <xxhash.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <string_view>

#include "muster/state.hpp"
#include "src/os/file.hpp"

namespace muster::versions {
namespace {

constexpr std::array<std::string_view, 3> format_names = {"xxh3-128", "adler32", "blake3"};
constexpr std::array<std::size_t, 3> checksum_digits = {32, 8, 64};
constexpr std::size_t half_digits = 16;
constexpr std::uint64_t hashed_at_once = std::uint64_t{1} << 20;

bool is_lower_hex(std::string_view text) noexcept {
  return text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

}  // namespace

std::string digest_text(const Digest& digest) {
  return fmt::format("{:016x}{:016x}", digest.high, digest.low);
}

std::optional<Digest> parse_digest(std::string_view text) noexcept {
  if (!is_checksum(ChecksumFormat::xxh3_128, text)) return std::nullopt;
  Digest digest;
  std::from_chars(text.data(), text.data() + half_digits, digest.high, 16);
  std::from_chars(text.data() + half_digits, text.data() + text.size(), digest.low, 16);
  return digest;
}

struct Digesting::State {
  XXH3_state_t xxh3;
};

Digesting::Digesting() : state_(std::make_unique<State>()) {
  XXH3_128bits_reset(&state_->xxh3);
}
Digesting::Digesting(Digesting&&) noexcept = default;
Digesting& Digesting::operator=(Digesting&&) noexcept = default;
Digesting::~Digesting() = default;

void Digesting::add(std::span<const std::byte> bytes) {
  if (!bytes.empty()) XXH3_128bits_update(&state_->xxh3, bytes.data(), bytes.size());
}

Digest Digesting::value() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(&state_->xxh3);
  return {hash.low64, hash.high64};
}

Digest digest_of_file(const std::string& path, const std::function<void(std::uint64_t)>& check) {
  const os::ReadableFile file = os::ReadableFile::open(path);
  Digesting digesting;
  std::vector<std::byte> memory(std::min(hashed_at_once, file.bytes()));
  for (std::uint64_t at = 0; at < file.bytes(); at += hashed_at_once) {
    const auto piece = std::span(memory).first(std::min(hashed_at_once, file.bytes() - at));
    file.read_at(at, piece);
    digesting.add(piece);
    check(piece.size());
  }
  return digesting.value();
}

std::string_view to_string(ChecksumFormat format) noexcept {
  return format_names.at(static_cast<std::size_t>(format));
}

std::optional<ChecksumFormat> checksum_format(std::string_view text) noexcept {
  const auto* const found = std::ranges::find(format_names, text);
  if (found == format_names.end()) return std::nullopt;
  return static_cast<ChecksumFormat>(found - format_names.begin());
}

bool is_supported(ChecksumFormat format) noexcept {
  return format != ChecksumFormat::blake3;
}

bool is_checksum(ChecksumFormat format, std::string_view text) noexcept {
  return text.size() == checksum_digits.at(static_cast<std::size_t>(format)) && is_lower_hex(text);
}

void TensorSum::add(std::span<const std::byte> bytes) {
  digesting_.add(bytes);
  if (format_ == ChecksumFormat::adler32)
    adler_ = static_cast<std::uint32_t>(adler32_z(adler_, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

std::string TensorSum::checksum() const {
  return format_ == ChecksumFormat::adler32 ? fmt::format("{:08x}", adler_) : digest_text(digest());
}

Digest state_digest(std::vector<TensorState>& tensors) {
  std::ranges::sort(tensors, {}, &TensorState::name);
  Digesting digesting;
  for (const TensorState& tensor : tensors) {
    const std::string line =
        fmt::format("{} {} [{}] {}\n", to_json(Config(tensor.name)), muster::to_string(tensor.spec.dtype),
                    fmt::join(tensor.spec.shape, ","), digest_text(tensor.digest));
    digesting.add(std::as_bytes(std::span(line)));
  }
  return digesting.value();
}

}  // namespace muster::versions
