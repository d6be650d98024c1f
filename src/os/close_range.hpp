// SPDX-License-Identifier: Apache-2.0
#pragma once
// Closes many descriptors, in a process that has just been forked. A header alone, because the reader of HDF5 files
// does not link the library.

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace muster::os {

/// Closes the descriptors `first` to `last`. Async-signal-safe. Without close_range(2) (Linux before 5.9, some
/// sandboxes), closes each number up to the soft limit of open files.
inline void close_range(unsigned first, unsigned last = ~0U) noexcept {
#ifdef SYS_close_range
  if (::syscall(SYS_close_range, first, last, 0U) == 0) return;
#endif
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const rlim_t end = std::min<rlim_t>(limit.rlim_cur, rlim_t{last} + 1);
  for (rlim_t fd = first; fd < end; ++fd) ::close(static_cast<int>(fd));
}

}  // namespace muster::os
