// SPDX-License-Identifier: Apache-2.0
#pragma once
// Included into sources by campaign.py. One file, mapped before anything else runs, says which mutant is on, and takes
// a byte for each place that was evaluated: signal handlers, forked children and fenced processes need no call for it.
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

namespace muster_mutation [[gnu::visibility("hidden")]] {

inline constexpr long header_size = 64;
inline unsigned char* seen = nullptr;
inline bool may_write = false;
inline int active = -1;

[[gnu::constructor(101)]] static void start() {
  if (seen != nullptr) return;
  const char* path = ::getenv("MUSTER_MUTANT_STATE");
  // Some tests start programs without an environment.
  if (path == nullptr) path = MUSTER_MUTANT_DEFAULT_STATE;
  const int writable = ::open(path, O_RDWR | O_CLOEXEC);
  const int descriptor = writable >= 0 ? writable : ::open(path, O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return;
  void* place = ::mmap(nullptr, MUSTER_MUTANT_STATE_SIZE, writable >= 0 ? PROT_READ | PROT_WRITE : PROT_READ,
                       MAP_SHARED, descriptor, 0);
  ::close(descriptor);
  if (place == MAP_FAILED) return;
  may_write = writable >= 0;
  active = *static_cast<int*>(place);
  seen = static_cast<unsigned char*>(place) + header_size;
}

// `key` is a variable that only the compiler's linker knows: code in which nothing depends on the mutant does not name
// it.
inline bool is_on(int number, const int& key) {
  if (may_write && seen[number] == 0) seen[number] = 1;
  return active == key;
}

}  // namespace gnu::visibility("hidden")]]

#define MUSTER_MUTANT(number) (::muster_mutation::is_on(number, muster_mutant_key_##number))
