// SPDX-License-Identifier: Apache-2.0
#include "src/trace/rings.hpp"

#include <algorithm>
#include <set>

#include "src/os/directory.hpp"
#include "src/os/process.hpp"
#include "src/os/shared_memory.hpp"
#include "src/trace/record.hpp"

namespace muster::trace {
namespace {

bool is_ring(const Ring& bytes) {
  return bytes.size() == ring_bytes &&
         std::equal(magic.begin(), magic.end(), reinterpret_cast<const char*>(bytes.data()));
}

/// Which process a ring is of: the text in its header.
std::string owner_of(const Ring& ring) {
  const char* const text = reinterpret_cast<const char*>(ring.data()) + offsetof(Header, identity);
  return {text, ::strnlen(text, sizeof(Header::identity))};
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
    // It has ended meanwhile, or is another user's.
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

}  // namespace muster::trace
