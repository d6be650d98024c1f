// SPDX-License-Identifier: Apache-2.0
#pragma once
// Restricts the test process, so that a rank cannot join a group: a limit of open files, and a sandbox.

#include <dirent.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <optional>
#include <stdexcept>

namespace muster::test {

/// Limits this process to `soft` more open files than it has now. The hard limit becomes `hard` more, or is unchanged
/// without `hard`.
inline void limit_open_files(unsigned soft, std::optional<unsigned> hard) {
  rlim_t open_now = 0;
  DIR* const all = ::opendir("/proc/self/fd");
  while (all != nullptr && ::readdir(all) != nullptr) ++open_now;
  if (all != nullptr) ::closedir(all);
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = open_now + soft;
  if (hard) limit.rlim_max = open_now + *hard;
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) throw std::runtime_error("setrlimit");
}

/// Makes pidfd_open fail in this process, as in a sandbox or before Linux 5.3.
inline void forbid_pidfd_open() {
  std::array<sock_filter, 4> program{{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pidfd_open, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog filter{program.size(), program.data()};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0)
    throw std::runtime_error("seccomp");
}

}  // namespace muster::test
