// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/assembly/export_fingerprint.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "muster/error.hpp"
#include "muster/safetensors.hpp"
#include "src/checkpoint/assembly/checksums.hpp"
#include "src/checkpoint/assembly/rank_messages.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/core/crc64.hpp"
#include "src/core/thread_pool.hpp"
#include "src/group/error_propagation.hpp"

namespace muster {

void ask_for_remainders(std::span<const FilePlan> files, const std::set<std::string>& there,
                        std::span<FileTarget> targets) {
  for (std::size_t i = 0; i < files.size(); ++i) {
    if (there.contains(files[i].name)) continue;
    for (const TensorEntry& entry : files[i].tensors) targets[i].ends.push_back(entry.offset + entry.bytes);
  }
}

void ExportFingerprint::gather(group::BaseGroup& group, const ProcessWork& work,
                               std::vector<std::vector<std::uint64_t>> remainders, std::span<const FilePlan> files) {
  if (std::ranges::all_of(work.targets, [](const FileTarget& target) { return target.ends.empty(); })) return;
  std::vector<std::uint64_t> sums;
  for (const std::vector<std::uint64_t>& file : remainders) sums.insert(sums.end(), file.begin(), file.end());
  const auto own = std::as_bytes(std::span(sums));
  const auto all = gather_messages(group, {own.begin(), own.end()}, {.phase = "export: adding the fingerprint"});
  if (group.rank() != 0) return;
  const std::uint64_t bytes = own.size();
  std::vector<std::uint64_t> other(sums.size());
  for (int rank = 1; rank < group.size(); ++rank) {
    const std::vector<std::byte>& message = all[static_cast<std::size_t>(rank)];
    // The other ranks have left this step, and wait for the next one.
    if (message.size() != bytes)
      group::fail(group, Error(ErrorKind::corrupt, "malformed message: it does not have one number per tensor",
                               {.rank = rank}));
    std::memcpy(other.data(), message.data(), bytes);
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] ^= other[i];
  }
  auto sum = sums.begin();
  for (std::size_t i = 0; i < files.size(); ++i) {
    if (work.targets[i].ends.empty()) continue;
    for (const TensorEntry& entry : files[i].tensors)
      fingerprint_.tensors.push_back({entry.name, {entry.dtype, entry.shape}, crc64_of_remainder(*sum++, entry.bytes)});
  }
}

Fingerprint ExportFingerprint::take(const std::string& directory, const std::set<std::string>& there,
                                    const std::function<void()>& between) {
  for (const std::string& name : there) {
    const SafetensorsFile file = SafetensorsFile::open(join_path(directory, name));
    std::vector<TensorFingerprint> tensors(file.tensors().size());
    parallel_for(tensors.size(), copy_workers(), [&](std::size_t i, std::size_t) {
      const TensorEntry& entry = file.tensors()[i];
      tensors[i] = {entry.name,
                    {entry.dtype, entry.shape},
                    checksum_of(file, i, ChecksumAlgorithm::crc64_xz, [&](std::uint64_t) { between(); })};
    });
    std::ranges::move(tensors, std::back_inserter(fingerprint_.tensors));
  }
  std::ranges::sort(fingerprint_.tensors, {}, &TensorFingerprint::name);
  return std::move(fingerprint_);
}

}  // namespace muster
