// SPDX-License-Identifier: Apache-2.0
#pragma once
// Checksums of tensors in versions of weights, and the digest of all tensors of a version.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/tensor.hpp"

namespace muster::versions {

/// An XXH3-128 with seed 0.
struct Digest {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  friend bool operator==(const Digest&, const Digest&) = default;
};
/// Returns 32 lower-case hexadecimal digits, in the canonical order of XXH3-128.
std::string digest_text(const Digest& digest);
std::optional<Digest> parse_digest(std::string_view text) noexcept;

/// Digests bytes that are added in pieces. Not thread-safe.
class Digesting {
 public:
  Digesting();
  Digesting(Digesting&&) noexcept;
  Digesting& operator=(Digesting&&) noexcept;
  ~Digesting();
  void add(std::span<const std::byte> bytes);
  [[nodiscard]] Digest value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Returns the digest of a whole file. `check` is called with the size of each piece, and may throw. Throws
/// Error(not_found | io).
Digest digest_of_file(const std::string& path, const std::function<void(std::uint64_t)>& check);

/// The checksums that the format knows.
enum class ChecksumFormat : std::uint8_t { xxh3_128, adler32, blake3 };
/// Returns "xxh3-128", "adler32" or "blake3".
std::string_view to_string(ChecksumFormat format) noexcept;
std::optional<ChecksumFormat> checksum_format(std::string_view text) noexcept;
/// Returns whether this build can compute it.
bool is_supported(ChecksumFormat format) noexcept;
/// Returns whether the text has the right number of lower-case hexadecimal digits.
bool is_checksum(ChecksumFormat format, std::string_view text) noexcept;

/// Computes the XXH3-128 and the checksum of a tensor, which is added in pieces. Not thread-safe.
class TensorSum {
 public:
  explicit TensorSum(ChecksumFormat format = ChecksumFormat::xxh3_128) : format_(format) {}
  void add(std::span<const std::byte> bytes);
  [[nodiscard]] Digest digest() const { return digesting_.value(); }
  /// Returns the checksum as the format writes it.
  [[nodiscard]] std::string checksum() const;

 private:
  ChecksumFormat format_;
  Digesting digesting_;
  std::uint32_t adler_ = 1;
};

/// A tensor of a version.
struct TensorState {
  std::string name;
  TensorSpec spec;
  Digest digest;
};
/// Returns the digest of a version: the XXH3-128 of the lines "NAME DTYPE SHAPE DIGEST\n", sorted by name. NAME is a
/// JSON string, and SHAPE is written as "[2,3]". Sorts the list.
Digest state_digest(std::vector<TensorState>& tensors);

}  // namespace muster::versions
