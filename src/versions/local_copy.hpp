// SPDX-License-Identifier: Apache-2.0
#pragma once
// The copy of a version on one host: the directory LOCAL.
//
//   LOCAL/                         a checkpoint in the Hugging Face layout
//   LOCAL/.weight_sync/state.json  the marker, which SGLang reads and writes: {"version": "000007"}
//   LOCAL/.weight_sync/lock        SGLang's lock, the same file in every new directory
//   LOCAL/.weight_sync/muster.json the record of Muster, below
//   .LOCAL.muster-lock             the lock of Muster, next to LOCAL; it stays
//
// The record lists the digests of all tensors, so that a pull need not read tensors that do not change. It is valid
// only if nobody else has changed LOCAL:
//
//  1. The marker has the version of the record.
//  2. The files with weights are those of the record: inode, size and time of the last change. Before a reboot also the
//     device, whose number may be another one afterwards.
//  3. A record of PullDurability::boot is void after a reboot, because nobody has synced the files.
//
// A program that changes a mapped file in memory (tmpfs) leaves its times unchanged. If a tensor that it changed is in
// a later version, the checksums do not match, and the copy is seeded again. Other changes are not noticed.

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/publish.hpp"
#include "src/os/clock.hpp"
#include "src/os/file.hpp"
#include "src/os/lock_file.hpp"
#include "src/versions/digest.hpp"

namespace muster::versions {

/// A file with weights, by which a change by another program is noticed.
struct CopiedFile {
  os::FileIdentity identity;
  std::uint64_t bytes = 0;
  std::int64_t changed_ns = 0;  ///< time of the last change, since 1970
};

/// The record.
struct CopyRecord {
  std::uint64_t version = 0;
  std::string stream = {};        ///< empty: the version records none
  std::string index_digest = {};  ///< OpenVersion::index_digest, or that of the base
  PullDurability durability = PullDurability::boot;
  std::string boot = {};                         ///< os::own_identity().boot of the process that made it
  std::map<std::string, CopiedFile> files = {};  ///< by name
  std::vector<TensorState> tensors = {};         ///< sorted by name
  Digest state = {};                             ///< state_digest of `tensors`
};
std::string record_text(const CopyRecord& record);
/// Throws Error(corrupt | version).
CopyRecord parse_record(std::string_view text);

std::string marker_text(std::uint64_t version);
/// Returns the version in the marker of a directory; nullopt if there is no marker that can be read.
std::optional<std::uint64_t> read_marker(const std::string& local) noexcept;

/// Returns the facts of a file. Throws Error(not_found | io).
CopiedFile copied_file(const std::string& path);

struct LocalCopy {
  std::optional<std::uint64_t> version = {};  ///< by the marker
  std::optional<CopyRecord> record = {};      ///< unset unless it is valid
  std::string reason = {};                    ///< the reason why there is no valid record: "it has no record"
};
/// Reads marker and record, and checks the record. Reads no weights. Never throws because of their contents.
LocalCopy read_local_copy(const std::string& local);

/// Returns the path of Muster's lock of a copy.
std::string lock_path(const std::string& local);

/// The two locks of a copy. Muster's lock excludes other pulls, SGLang's lock also SGLang's own reader.
class CopyLocks {
 public:
  /// Takes Muster's lock. `local` has no trailing slash, and its parent exists. `check` is called while waiting and may
  /// throw. Throws Error(timeout) after `timeout`, Error(unsupported) without locks, Error(io).
  CopyLocks(std::string local, std::chrono::milliseconds timeout, std::function<void()> check);
  /// Takes SGLang's lock of the directory, which exists. The time of the first wait counts, too. Throws as the
  /// constructor.
  void take_inner();
  /// Gives the successor of the directory the same lock file. If there is none, or no link to it can be made, the
  /// successor gets a file of its own, whose lock is taken.
  void pass_on(const std::string& successor);

 private:
  void take(os::LockFile& lock);

  std::string local_;
  std::chrono::milliseconds timeout_;
  os::Clock::time_point end_;
  std::function<void()> check_;
  std::optional<os::LockFile> outer_;
  std::optional<os::LockFile> inner_;
  std::optional<os::LockFile> next_;
};

}  // namespace muster::versions
