// SPDX-License-Identifier: Apache-2.0
#pragma once
// The fingerprint of a checkpoint from the bytes that the ranks write to it. A file is a sequence of tensors, and each
// rank writes some ranges of it. So a rank adds the remainders of its ranges, each shifted to the end of its tensor
// (core/crc64.hpp), and rank 0 adds those of all ranks: 8 bytes per tensor and rank.

#include <cstdint>
#include <functional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "muster/fingerprint.hpp"
#include "src/checkpoint/assembly/assembly.hpp"
#include "src/group/group.hpp"

namespace muster {

/// Asks the ranks for the remainders of these files, except for those that exist already. The targets are those of the
/// files, in the same order.
void ask_for_remainders(std::span<const FilePlan> files, const std::set<std::string>& there,
                        std::span<FileTarget> targets);

class ExportFingerprint {
 public:
  /// Collective. Adds the tensors of one assembly on rank 0, whose `files` are those of the plan. Does nothing if no
  /// remainders were wanted.
  void gather(group::BaseGroup& group, const ProcessWork& work, std::vector<std::vector<std::uint64_t>> remainders,
              std::span<const FilePlan> files);

  /// Returns the fingerprint on rank 0. Reads the files `there` in `directory`, which an earlier export wrote; calls
  /// `between` meanwhile. Throws as SafetensorsFile::open and read.
  Fingerprint take(const std::string& directory, const std::set<std::string>& there,
                   const std::function<void()>& between);

 private:
  Fingerprint fingerprint_;
};

}  // namespace muster
