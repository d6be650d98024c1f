// SPDX-License-Identifier: Apache-2.0
#pragma once
// The versions in a SOURCE directory, and the chain that leads to one of them. A chain is a beginning and the deltas
// after it. The beginning is the newest full version, the local copy, or the base.
//
//  1. The directory is listed. A name is opened only if a listing has shown it (workspace/discovery.hpp).
//  2. A version without an index is unfinished, unless its only weights are model.safetensors: that is a full version.
//  3. The index names the files. Other files in the directory are ignored. Each file is as long as its header says.
//  4. A defect that a later read may cure (a missing, short or unparsable file) is retried until the deadline.
//  5. All versions of the chain are checked before any byte of a tensor is read.

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "muster/safetensors.hpp"
#include "src/checkpoint/model/tensor_source.hpp"
#include "src/versions/version_index.hpp"
#include "src/workspace/discovery.hpp"

namespace muster::versions {

/// The place of a tensor in the files of a version.
struct TensorPlace {
  std::size_t file = 0;
  std::size_t index = 0;      ///< in SafetensorsFile::tensors()
  std::string checksum = {};  ///< for a delta: of the new bytes of the tensor
};

/// A version whose files are open.
struct OpenVersion {
  std::string path;
  VersionIndex index;
  std::string index_digest = {};  ///< identifies the version, even if its publisher recorded no digests
  std::vector<SafetensorsFile> files = {};
  std::unordered_map<std::string, TensorPlace> tensors = {};
  [[nodiscard]] std::uint64_t number() const noexcept { return index.version; }
  /// Returns the place of a tensor, or null.
  [[nodiscard]] const TensorPlace* find(const std::string& name) const noexcept;
};

/// The numbers of the versions in a listing, and the other names in it.
struct VersionNames {
  std::vector<std::uint64_t> versions = {};  ///< ascending
  std::vector<std::string> unfinished = {};  ///< directories that a publisher has not completed
  std::vector<std::string> others = {};
};
/// Lists SOURCE. Throws Error(not_found | io).
VersionNames list_versions(const std::string& source);

/// Opens one version and checks it. Throws Error(corrupt | not_found | io | unsupported) that names version, file and
/// tensor.
OpenVersion open_version(const std::string& source, std::uint64_t version);

/// Checks that the deltas fit the tensors before them: each of their tensors exists there, and its frame states a
/// length that fits the tensor. Reads the first bytes of each frame. Returns the memory that the
/// decoder of one tensor of one delta needs at most. Throws Error(corrupt | io).
std::uint64_t check_deltas(std::span<const OpenVersion> deltas, const std::vector<TensorEntry>& tensors);

/// The local copy as a possible beginning.
struct LocalBeginning {
  std::uint64_t version = 0;
  Digest state = {};              ///< state_digest of its tensors
  std::string index_digest = {};  ///< OpenVersion::index_digest, or ChainRequest::base_digest
};

struct Chain {
  enum class Beginning : std::uint8_t { base, full, local };
  Beginning beginning = Beginning::base;
  std::uint64_t begin_version = 0;       ///< 0 for the base
  std::optional<OpenVersion> full = {};  ///< set if `beginning` is full
  std::vector<OpenVersion> deltas = {};  ///< ascending, without gaps, up to the target
  std::uint64_t target = 0;
  [[nodiscard]] const OpenVersion* last() const noexcept {
    return !deltas.empty() ? &deltas.back() : full ? &*full : nullptr;
  }
};

struct ChainRequest {
  std::optional<std::uint64_t> target = {};  ///< unset: the newest version; 0: the base
  std::optional<LocalBeginning> local = {};
  bool has_base = false;              ///< the chain may begin at the base
  std::string base_digest = {};       ///< identifies the base; empty: unknown
  std::chrono::milliseconds wait{0};  ///< for versions and files that are not visible yet
  std::function<void()> check = {};   ///< called while waiting; may throw
};
/// Waits until the target exists, at most for ChainRequest::wait. Throws Error(not_found) if it does not.
void wait_for_target(const std::string& source, const ChainRequest& request);
/// Whether the publisher of a version has completed it: it has an index, or is a single file. Throws Error(not_found |
/// io).
bool is_complete(const std::string& source, std::uint64_t version);

/// Finds and opens the chain. If the local copy has the target already, the chain has no deltas and begins there. The
/// local copy is the beginning only if the versions prove that it belongs to them: by the digests that Muster records,
/// or by the index of its version. Throws as open_version, Error(not_found) if the target or a version of the chain is
/// missing, and Error(corrupt) if a version does not continue the one before it.
Chain open_chain(const std::string& source, const ChainRequest& request);

/// Reads a tensor of the beginning, and applies the deltas of a chain to it, piece by piece. Not thread-safe.
class FoldedReader {
 public:
  /// `begin` has the tensor `index`. `deltas` must outlive this object. Without `is_summed`, an unchanged tensor has no
  /// digest.
  FoldedReader(const TensorSource& begin, std::size_t index, std::span<const OpenVersion> deltas,
               bool is_summed = true);
  FoldedReader& operator=(FoldedReader&&) = delete;
  ~FoldedReader();
  /// Whether a delta changes the tensor.
  [[nodiscard]] bool is_changed() const noexcept;
  /// Fills `piece` with the next bytes of the tensor. Throws Error(corrupt) that names version, file and tensor, and as
  /// the source.
  void next(std::span<std::byte> piece);
  /// Ends the tensor. Compares the checksum of the last delta that changes it. Throws Error(corrupt).
  void end();
  /// Returns the digest of the tensor's bytes, after end().
  [[nodiscard]] Digest digest() const;
  /// Returns the compressed bytes of the deltas.
  [[nodiscard]] std::uint64_t delta_bytes() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Returns how many deltas one FoldedReader may have, so that `threads` of them stay within the memory of a pull.
std::size_t deltas_at_once(std::size_t threads, std::uint64_t memory) noexcept;

/// The size of the pieces in which tensors are read and written: a multiple of every element size.
inline constexpr std::uint64_t piece_bytes = std::uint64_t{256} << 10;

}  // namespace muster::versions
