// SPDX-License-Identifier: Apache-2.0
#pragma once
// The names and the index of a version. The index is model.safetensors.index.json in the directory weight_v00000N. Its
// metadata makes a version a delta, and its weight_map names the files.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/publish.hpp"
#include "src/versions/digest.hpp"

namespace muster::versions {

// The files in the folder sync_folder of a local copy: the marker, the lock of SGLang, the record of Muster.
inline constexpr std::string_view marker_name = "state.json";
inline constexpr std::string_view sync_lock_name = "lock";
inline constexpr std::string_view record_name = "muster.json";

/// The largest number that a version can have.
inline constexpr std::uint64_t last_version = 999'999'999'999;

/// Returns "000007", or more digits for numbers from a million on.
std::string version_digits(std::uint64_t version);
/// Parses digits of any length up to that of last_version.
std::optional<std::uint64_t> parse_version_digits(std::string_view text) noexcept;
/// Returns "weight_v000007".
std::string version_name(std::uint64_t version);
/// Returns nullopt if the name is not exactly the one of a version.
std::optional<std::uint64_t> parse_version_name(std::string_view name) noexcept;

/// A file of a version, as the publisher recorded it.
struct FileFacts {
  std::uint64_t bytes = 0;
  Digest digest;
  friend bool operator==(const FileFacts&, const FileFacts&) = default;
};

/// Facts that Muster adds to the index, as a text under the key "muster" of the metadata.
struct OwnFacts {
  std::string stream = {};     ///< the same for all versions of a run, across restarts of the trainer
  std::string publisher = {};  ///< host and process of rank 0
  int ranks = 1;               ///< number of ranks that published it
  std::map<std::string, FileFacts> files = {};
  std::optional<Digest> before = {};  ///< state_digest of the previous version; unset: unknown
  Digest after = {};                  ///< state_digest of this version
  std::uint64_t elements = 0;         ///< of the model
  std::uint64_t changed_elements = 0;
};

struct VersionIndex {
  std::uint64_t version = 0;
  VersionKind kind = VersionKind::full;
  // For a delta.
  std::uint64_t base_version = 0;
  DeltaEncoding encoding = DeltaEncoding::exclusive_or;
  ChecksumFormat checksums = ChecksumFormat::xxh3_128;
  std::uint64_t total_size = 0;                                   ///< for a full version: bytes of its tensors
  std::vector<std::pair<std::string, std::string>> weights = {};  ///< tensor and file
  std::optional<OwnFacts> own = {};
};

/// Returns the text of the index.
std::string version_index_text(const VersionIndex& index);
/// Parses the index of the directory weight_v00000N. `path` is for messages. Throws Error(corrupt) if it contradicts
/// the format: an unknown encoding, a number other than N or N - 1, or a file name that is a path; Error(unsupported)
/// for another compression or a checksum that this build lacks.
VersionIndex parse_version_index(std::string_view text, const std::string& path, std::uint64_t version);

}  // namespace muster::versions
