// SPDX-License-Identifier: Apache-2.0
#pragma once
// The version before the one that is published: its tensors on one rank. Their bytes are in memory, in a copy of the
// version, or are computed from the beginning of the chain and its deltas.

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "muster/model_dir.hpp"
#include "src/checkpoint/assembly/shard_set.hpp"
#include "src/versions/chain.hpp"

namespace muster::versions {

/// The tensors of a chain's beginning, or of a copy. Throws as ModelDir::open.
std::shared_ptr<const TensorSource> tensors_of_model(const std::string& directory);
std::shared_ptr<const TensorSource> tensors_of_version(const OpenVersion& full);

/// Where the old version is.
struct OldPlace {
  std::string source = {};
  std::string base = {};
  std::string copy = {};              ///< a directory that has the version; empty: there is none
  std::chrono::milliseconds wait{0};  ///< for files that other hosts wrote
  std::function<void()> check = {};   ///< called during long work, on any thread; may throw
};

/// Not thread-safe, except for reader().
class OldVersion {
 public:
  OldVersion();
  OldVersion& operator=(OldVersion&&) = delete;
  ~OldVersion();

  /// Selects the version. If it is another one than advance() made, everything is forgotten.
  void select(OldPlace place, std::uint64_t version);
  /// Sets facts(), without the rest of the chain: for a full version, which does not need the old one. If the version
  /// cannot be read, there are none.
  void load_facts() noexcept;
  /// Returns its tensors by name. Opens the version if necessary. Throws as open_chain.
  const std::map<std::string, TensorSpec>& specs();
  /// Returns what its publisher recorded; nullopt for the base, and for publishers other than Muster. Call specs()
  /// first.
  [[nodiscard]] const std::optional<OwnFacts>& facts() const noexcept { return facts_; }
  /// Returns the newest full version up to this one; nullopt if there is none. Call specs() first.
  [[nodiscard]] std::optional<std::uint64_t> newest_full() const noexcept { return newest_full_; }
  /// Makes reader() usable for these tensors. Throws as open_chain.
  void require(const std::vector<std::string>& names);
  /// Whether a tensor is in memory, so that its bytes were verified before.
  [[nodiscard]] bool is_kept(const std::string& name) const noexcept;
  /// Returns a reader of the bytes of a tensor. `is_summed` as for FoldedReader.
  [[nodiscard]] std::unique_ptr<FoldedReader> reader(const std::string& name, bool is_summed) const;

  /// Makes the version after it the selected one, after it was published, and keeps the bytes of these tensors in
  /// memory. If this fails, everything is forgotten. Throws as open_version.
  void advance(const std::vector<std::string>& names, std::map<std::string, TensorSpec> specs, const OwnFacts& facts);
  /// Frees all memory, so that the next call opens the version again.
  void forget() noexcept;

 private:
  class Kept;
  void load();

  OldPlace place_;
  std::optional<std::uint64_t> version_;
  std::map<std::string, TensorSpec> specs_;
  std::optional<OwnFacts> facts_;
  std::optional<std::uint64_t> newest_full_;
  std::unique_ptr<Kept> kept_;
  // The beginning of the chain, for tensors that are not in memory; null until it is used.
  std::shared_ptr<const TensorSource> begin_;
  std::unordered_map<std::string, std::size_t> places_;  // by name, of its tensors
  std::vector<OpenVersion> deltas_;
};

}  // namespace muster::versions
