// SPDX-License-Identifier: Apache-2.0
#include "src/trace/rings.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <set>

#include "src/base/fixed_string.hpp"
#include "src/os/clock.hpp"
#include "src/os/directory.hpp"
#include "src/os/process.hpp"
#include "src/os/publish.hpp"
#include "src/os/shared_memory.hpp"
#include "src/trace/reading.hpp"

namespace muster::trace {
namespace {

bool is_ring(const Ring& bytes) {
  return bytes.size() == ring_bytes &&
         std::equal(magic.begin(), magic.end(), reinterpret_cast<const char*>(bytes.data()));
}

/// Returns the process that owns a ring, from the text in its header.
std::string owner_of(const Ring& ring) {
  const char* const text = reinterpret_cast<const char*>(ring.data()) + offsetof(TraceHeader, identity);
  return {text, ::strnlen(text, sizeof(TraceHeader::identity))};
}

constexpr std::size_t most_kept = 8;
constexpr std::chrono::seconds one_failure{5};  // failures within this time have the same cause

std::vector<std::byte> bytes_of(std::string_view words, const std::vector<Ring>& rings) {
  FailureHead head{};
  std::ranges::copy(failure_magic, head.magic.begin());
  head.version = version;
  head.rings = static_cast<std::uint32_t>(rings.size());
  head.time = os::now_ns();
  head.wall_clock = static_cast<std::int64_t>(os::clock_ns(CLOCK_REALTIME) - head.time);
  put_text(head.words, words);
  std::vector<std::byte> bytes(sizeof head + rings.size() * ring_bytes);
  std::memcpy(bytes.data(), &head, sizeof head);
  for (std::size_t i = 0; i < rings.size(); ++i)
    std::memcpy(bytes.data() + sizeof head + i * ring_bytes, rings[i].data(), ring_bytes);
  return bytes;
}

/// Returns the rings of the job of this process.
std::vector<Ring> rings_of_job(std::string& job) {
  std::vector<Ring> rings = rings_of("self");
  const os::ProcessIdentity own = os::own_identity();
  std::vector<std::string> jobs;
  std::set<std::string> owners;
  std::erase_if(rings, [&](const Ring& ring) {
    try {
      const Process process = parse(ring, "a ring");
      if (!owners.insert(os::identity_text(process.identity)).second) return true;
      if (process.identity == own) job = process.job;
      jobs.push_back(process.job);
      return false;
    } catch (const std::exception&) {
      return true;
    }
  });
  std::size_t at = 0;
  std::erase_if(rings, [&](const Ring&) { return jobs[at++] != job; });
  return rings;
}

}  // namespace

std::vector<Ring> rings_of(const std::string& pid) noexcept {
  std::vector<Ring> rings;
  try {
    const std::string directory = "/proc/" + pid + "/fd";
    for (const os::DirectoryEntry& entry : os::list_directory(directory)) {
      Ring ring = os::beginning_of_shared_memory(directory + "/" + entry.name, ring_bytes);
      if (is_ring(ring)) rings.push_back(std::move(ring));
    }
  } catch (const std::exception&) {
    // The process has ended meanwhile, or belongs to another user.
  }
  return rings;
}

std::vector<Ring> all_rings() {
  std::vector<Ring> rings;
  std::set<std::string> owners;
  for (const os::DirectoryEntry& entry : os::list_directory("/proc")) {
    if (entry.name.find_first_not_of("0123456789") != std::string::npos) continue;
    for (Ring& ring : rings_of(entry.name))
      if (owners.insert(owner_of(ring)).second) rings.push_back(std::move(ring));
  }
  return rings;
}

std::string failure_directory() {
  return fmt::format("{}/muster-{}", os::environment("TMPDIR").value_or("/tmp"), os::user_id());
}

std::vector<std::string> failures_in(const std::string& directory) {
  std::vector<std::pair<std::chrono::system_clock::time_point, std::string>> found;
  if (!os::file_status(directory, os::Links::followed)) return {};
  for (const os::DirectoryEntry& entry : os::list_directory(directory)) {
    if (!entry.name.ends_with(failure_suffix)) continue;
    const std::string path = directory + "/" + entry.name;
    const auto status = os::file_status(path);
    if (status && status->is_regular) found.emplace_back(status->changed, path);
  }
  std::ranges::sort(found, std::greater());
  std::vector<std::string> paths;
  paths.reserve(found.size());
  for (auto& [time, path] : found) paths.push_back(std::move(path));
  return paths;
}

RanksAtFailure::RanksAtFailure(bool is_first) noexcept {
  try {
    if (is_first) rings_ = rings_of_job(job_);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the failure itself is more important
  }
}

void RanksAtFailure::keep(std::string_view words) const noexcept {
  if (rings_.empty()) return;
  try {
    const std::vector<std::byte> bytes = bytes_of(words, rings_);
    // Only this user may have access to the private directory. The directory of MUSTER_TRACE is chosen by the user.
    if (const std::string own = failure_directory(); os::make_own_directory(own)) keep_in(own, bytes);
    if (const auto traces = os::environment("MUSTER_TRACE"); traces && os::file_status(*traces, os::Links::followed))
      keep_in(*traces, bytes);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): likewise
  }
}

void RanksAtFailure::keep_in(const std::string& directory, std::span<const std::byte> bytes) const {
  // One file per job and host: the first rank writes it.
  const std::string path = fmt::format("{}/{}-{}{}", directory, job_, os::own_identity().host, failure_suffix);
  if (const auto there = os::file_status(path)) {
    if (std::chrono::system_clock::now() - there->changed < one_failure) return;
    os::remove_file(path);
  }
  os::write_new_file(path, bytes);
  const std::vector<std::string> all = failures_in(directory);
  for (std::size_t i = most_kept; i < all.size(); ++i) os::remove_file(all[i]);
}

}  // namespace muster::trace
