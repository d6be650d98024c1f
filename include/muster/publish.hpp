// SPDX-License-Identifier: Apache-2.0
#pragma once
// Versions of weights: a trainer publishes the weights of its model in a directory again and again, and the hosts of
// inference engines pull them. A version is a full checkpoint, or a delta that has only the changes since the previous
// version. The format is that of slime, miles and SGLang (docs/reference/versions.md).
//
// SOURCE is a directory that all hosts see. Version N is its directory weight_v00000N, which appears in one step and
// never changes. Version 0 is the *base*, the model directory with which the trainer and the engines begin; it is not
// in SOURCE.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "muster/group.hpp"
#include "muster/omission.hpp"
#include "muster/parallel_layout.hpp"
#include "muster/progress.hpp"
#include "muster/tensor.hpp"

namespace muster {

/// The contents of a version.
enum class VersionKind : std::uint8_t {
  full,   ///< all tensors, as a checkpoint in the Hugging Face layout
  delta,  ///< the changes since the previous version
};
/// Returns "full" or "delta".
std::string_view to_string(VersionKind kind) noexcept;

/// The form of the changes in a delta.
enum class DeltaEncoding : std::uint8_t {
  exclusive_or,  ///< the new bytes XOR the old ones
  overwrite,     ///< the positions and the new values of changed bytes; for tensors of less than 4 GiB
};
/// Returns "xor" or "overwrite", as the format spells them.
std::string_view to_string(DeltaEncoding encoding) noexcept;

/// Options of a publisher. Every rank uses `base` and `base_copy`; only rank 0 uses the other options.
struct PublisherOptions {
  /// The model directory that is version 0. Every rank must be able to read it.
  std::string base = {};
  /// The plan that merges the tensors of ranks, as for export_model(). Empty: each part states its place in its tensor,
  /// or the shards record their plan.
  std::string plan = {};
  /// The layout of the ranks for the plan, as ExportOptions::source_layout.
  std::optional<ParallelLayout> source_layout = {};
  /// The form of the changes.
  DeltaEncoding encoding = DeltaEncoding::exclusive_or;
  /// If not 0, every version whose number is a multiple of it is full.
  std::uint64_t full_every = 0;
  /// A directory on each host of the trainer for a copy of the newest version. Each call updates it by pull_version(),
  /// and computes the delta against it. Empty: a Publisher keeps the newest version in memory, distributed over the
  /// ranks. publish_version() then rebuilds it from the newest full version, or `base`, and the deltas.
  std::string base_copy = {};
  /// A version is deleted if a newer full version exists, at least `keep` versions are newer, and it was published more
  /// than `keep_for` ago. The newest full version and the versions after it are never deleted.
  std::uint64_t keep = 8;
  /// See `keep`.
  std::chrono::seconds keep_for = std::chrono::minutes(10);
  /// Unfinished versions are deleted if their process is known to have ended. If this time is set, those of processes
  /// on other hosts are also deleted if they have not changed for that long.
  std::optional<std::chrono::seconds> stale_after = {};
  /// As ExportOptions::check_replicas.
  bool check_replicas = true;
};

/// Options of one version. Only rank 0 uses them, except for `stop`.
struct PublishOptions {
  bool full = false;  ///< publishes all tensors, even if a delta is possible
  /// The expected number. If the next version has another number, the call throws Error(invalid_argument).
  std::optional<std::uint64_t> version = {};
  /// Receives reports of the progress.
  ProgressCallback progress = {};
  /// A stop request on any rank ends the call on all ranks with Error(cancelled), and aborts the group. No version
  /// appears.
  std::stop_token stop = {};
};

/// The result of publishing a version. Rank 0 fills all members, the other ranks only `version`.
struct PublishReport {
  std::uint64_t version = 0;                ///< its number
  VersionKind kind = VersionKind::full;     ///< full or delta
  std::string path = {};                    ///< its directory
  std::uint64_t tensors = 0;                ///< number of tensors of the model
  std::uint64_t bytes = 0;                  ///< bytes of the tensors of the model
  std::uint64_t changed_tensors = 0;        ///< number of tensors in the version
  std::uint64_t changed_elements = 0;       ///< for a delta: elements that differ from the previous version
  std::uint64_t bytes_written = 0;          ///< bytes of its files with weights
  std::uint64_t files = 0;                  ///< number of its files with weights
  std::string reason = {};                  ///< for a full version: the reason why it is not a delta
  std::vector<std::uint64_t> removed = {};  ///< old versions that were deleted
  Omissions skipped = {};                   ///< tensors and files that are not in the version
  std::vector<std::string> notes = {};      ///< remarks for users of the version
  double seconds = 0;                       ///< duration of the call
};

/// Publishes version after version from the memory of the ranks of a group.
class Publisher {
 public:
  /// Collective over `group`, which must outlive this object. `source` is created if it does not exist; its parent must
  /// exist. Throws Error(invalid_argument | not_found) if there is no base.
  Publisher(std::string source, PublisherOptions options, Group& group);
  Publisher(Publisher&&) noexcept;
  Publisher& operator=(Publisher&&) noexcept;
  ~Publisher();

  /// Publishes the tensors as the next version. Collective: each rank passes its parts, as for export_model() of
  /// tensors (live_export.hpp), on the host or on a GPU. The tensors must not change during the call.
  ///
  /// The version is full if `full` or `full_every` requests it, or if its tensors do not have the names, dtypes and
  /// shapes of the previous version. Otherwise it is a delta. A version without changes is an empty delta. When the
  /// call returns, the version is durable and visible in SOURCE. Other hosts see it after the delay of their file
  /// system.
  ///
  /// The first call continues after the newest version in SOURCE. It reads that version to compute the delta.
  ///
  /// Each failure is one error that all ranks throw. No version appears then, and the next call may try again. There is
  /// one exception: if a rank is lost after the version has appeared, the call fails, too, and the next version has the
  /// number after it. The group stays usable after Error(invalid_argument | rank_mismatch | not_found | corrupt | io |
  /// out_of_space | unsupported). Error(timeout | peer_lost | cancelled) aborts it. Throws Error(invalid_argument) if
  /// another publisher has taken the number, or if the chain in SOURCE does not begin at this base.
  PublishReport publish(std::span<const TensorPart> parts, const PublishOptions& options = {});

 private:
  class State;
  std::unique_ptr<State> state_;
};

/// Publishes a model, or the shards of ranks, from files. Collective over `group`; the ranks share the work.
/// `model_or_shards` is what export_model() accepts. Throws as Publisher::publish().
PublishReport publish_version(const std::string& model_or_shards, const std::string& source,
                              const PublisherOptions& options, Group& group, const PublishOptions& publish = {});

/// The time until which a copy is usable.
enum class PullDurability : std::uint8_t {
  boot,    ///< until the host restarts; the next pull then copies the whole model again
  synced,  ///< after a power failure, too; slower
};

/// Options of pull_version().
struct PullOptions {
  /// The model directory that is version 0. It may be empty if the pull can begin at a full version or at `local`.
  std::string base = {};
  /// The version to pull; 0: the base; unset: the newest one. If SOURCE has no version, `wait` is zero and `local` has
  /// no version either, unset means the base.
  std::optional<std::uint64_t> version = {};
  /// How long to wait for a version, or for files of it, that do not exist yet or that a network file system does not
  /// show yet. Zero: it must exist.
  std::chrono::milliseconds wait = std::chrono::milliseconds(0);
  /// How long to wait for another process of this host that pulls to the same directory.
  std::chrono::milliseconds lock_timeout = std::chrono::minutes(30);
  /// The time until which the copy is usable.
  PullDurability durability = PullDurability::boot;
  /// Receives reports of the progress.
  ProgressCallback progress = {};
  /// A stop request ends the call with Error(cancelled). `local` is unchanged then.
  std::stop_token stop = {};
};

/// The result of pull_version().
struct PullReport {
  std::uint64_t version = 0;                   ///< the version that `local` has now
  std::optional<std::uint64_t> previous = {};  ///< the version that it had before; unset: none, or unknown
  bool is_changed = false;                     ///< false: `local` already had the version
  std::string begun_at = {};                   ///< "local", "base", or the name of the full version that was copied
  std::vector<std::uint64_t> applied = {};     ///< the deltas that were applied
  std::uint64_t changed_tensors = 0;           ///< number of tensors that the deltas change
  std::uint64_t bytes_read = 0;                ///< bytes of weights and deltas that were read
  std::uint64_t bytes_written = 0;             ///< bytes of weights that were written
  std::uint64_t bytes_linked = 0;              ///< bytes of files that the copy shares with its predecessor
  Omissions skipped = {};                      ///< files that were not copied
  std::vector<std::string> notes = {};         ///< remarks for users of the copy
  double seconds = 0;                          ///< duration of the call
};

/// Brings the directory `local` of this host to a version. Local: any number of processes of a host may call it at the
/// same time; one of them pulls, and the others wait and find the work done.
///
/// At any moment `local` is the old version or the new one, with the marker .weight_sync/state.json that SGLang reads.
/// docs/reference/versions.md names the exception: file systems that cannot exchange two names. A process keeps the
/// files of the old version that it has open. If the call fails, `local` is unchanged.
///
/// All indexes and headers of the chain are checked before anything is written, and the checksums of changed tensors
/// before the new version takes its place. Throws Error(corrupt) that names version, file and tensor if a version
/// contradicts the format, or if its checksums do not match. Throws Error(not_found) if the version, or a version of
/// its chain, does not exist after `wait`. Throws Error(timeout) if another process still pulls after `lock_timeout`.
/// Throws Error(invalid_argument) if `local` is the base, is a mount point, or has files but no marker, and also if
/// the chain begins at the base and `base` is empty. Throws Error(unsupported) for formats that this build cannot read,
/// and Error(out_of_space | io).
PullReport pull_version(const std::string& source, const std::string& local, const PullOptions& options = {});

/// A version in a SOURCE directory.
struct VersionInfo {
  std::uint64_t version = 0;                       ///< its number
  std::string path = {};                           ///< its directory
  std::optional<VersionKind> kind = {};            ///< full or delta; unset: the version cannot be read
  std::optional<std::uint64_t> base_version = {};  ///< for a delta: the version that it changes
  /// The full version at which the chain to this version begins; 0: the base; unset: no chain reaches it. If old
  /// versions have been deleted, deltas before the oldest full version have no chain, and that is not a defect.
  std::optional<std::uint64_t> begins_at = {};
  std::optional<DeltaEncoding> encoding = {};            ///< for a delta
  std::string checksum_format = {};                      ///< for a delta: "xxh3-128", "adler32" or "blake3"
  std::uint64_t tensors = 0;                             ///< number of tensors in its files
  std::uint64_t files = 0;                               ///< number of its files with weights
  std::uint64_t bytes = 0;                               ///< bytes of these files
  std::optional<std::uint64_t> elements = {};            ///< elements of the model; unset: not recorded
  std::optional<std::uint64_t> changed_elements = {};    ///< for a delta: changed elements; unset: not recorded
  std::string stream = {};                               ///< identifies the run of versions; empty: not recorded
  std::string publisher = {};                            ///< host and process of rank 0; empty: not recorded
  std::optional<int> ranks = {};                         ///< number of ranks that published it; unset: not recorded
  std::string digest = {};                               ///< digest of all tensors of the version; empty: not recorded
  std::chrono::system_clock::time_point published = {};  ///< time of the last change of its directory
  std::vector<std::string> problems = {};                ///< defects; empty: none was found
};

/// The copy of a version on this host.
struct LocalVersion {
  std::string path = {};                      ///< its directory
  std::optional<std::uint64_t> version = {};  ///< by its marker; unset: it has none
  /// Whether the record of Muster is valid, so that the next pull can begin here.
  bool has_record = false;
  std::string reason = {};  ///< if there is no valid record: the reason
};

/// The versions of a SOURCE directory.
struct VersionLog {
  std::string source = {};                       ///< the directory
  std::vector<VersionInfo> versions = {};        ///< ascending
  std::vector<std::string> unfinished = {};      ///< names of directories that publishers have not completed
  std::vector<std::string> other_names = {};     ///< other entries of the directory
  std::optional<LocalVersion> local = {};        ///< set if LogOptions::local is
  std::vector<std::string> problems = {};        ///< defects of the chain, such as a missing version
  [[nodiscard]] bool is_sound() const noexcept;  ///< whether neither the chain nor a version has problems
};

/// Options of read_versions().
struct LogOptions {
  /// The model directory that is version 0. `verify` needs it if version 1 is a delta.
  std::string base = {};
  std::string local = {};  ///< a copy on this host to report on
  /// Reads all files, and compares their checksums. Deltas are applied in memory, piece by piece, and nothing is
  /// written.
  bool verify = false;
  /// Receives reports of the progress.
  ProgressCallback progress = {};
  /// A stop request ends the call with Error(cancelled).
  std::stop_token stop = {};
};

/// Returns all versions in a SOURCE directory. Defects are results, not errors. Local. Throws Error(not_found | io) if
/// the directory cannot be read, and Error(invalid_argument) if `verify` needs a base and there is none. Throws as
/// ModelDir::open() if the base cannot be read.
VersionLog read_versions(const std::string& source, const LogOptions& options = {});

}  // namespace muster
