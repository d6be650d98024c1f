// SPDX-License-Identifier: Apache-2.0
#pragma once
// campaign.py includes this file into the sources. Every program maps one file before anything else runs. The file has
// the number of the active mutant, and one byte for each place, which is set when the place is evaluated. This works
// without a call in signal handlers, forked children and sandboxed processes.
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

// Each library has its own copy of these variables.
#pragma GCC visibility push(hidden)
namespace muster_mutation {

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

// `key` is a weak variable, so the compiler does not know its value. Code in which nothing depends on the mutant has no
// reference to it.
inline bool is_on(int number, const int& key) {
  if (may_write && seen[number] == 0) seen[number] = 1;
  return active == key;
}

}  // namespace muster_mutation
#pragma GCC visibility pop

#define MUSTER_MUTANT(number) (::muster_mutation::is_on(number, muster_mutant_key_##number))
