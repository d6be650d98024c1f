// SPDX-License-Identifier: Apache-2.0
#pragma once
// The seam where tests let system calls fail: the wrappers of files, shared memory (memfd_create, open, fcntl,
// ftruncate, fallocate, fstat, pwrite, mmap; their path is "shared memory") and Unix sockets (socket, connect, accept,
// sendmsg, recvmsg; "a rank's socket"; socket: "TCP") ask here before they call the kernel. So do the look at "the
// network namespace" (stat), and messages between hosts "about a failure" (send).
//
// From outside a process: MUSTER_FAULT=CALL:ERRNO:NTH[:PATH-PART], such as "pwrite:ENOSPC:3:model-00002". The NTH such
// call (from 1 on; 0: each) on a path that has PATH-PART in it fails with ERRNO, a name or a number. "pwrite:short:1"
// writes less than was asked for, "pread:short:1" reads less.

#include <cerrno>
#include <cstddef>
#include <span>
#include <string_view>

namespace muster::os {

/// The errno that a call shall fail with, 0 for none; `short_transfer` lets pwrite and pread move a part.
using FaultHook = int (*)(std::string_view call, std::string_view path);
inline constexpr int short_transfer = -1;

/// Replaces the hook of this process (null: none); MUSTER_FAULT is not looked at any more.
void set_fault_hook(FaultHook hook) noexcept;

/// What the hook says. Nothing but a load where none is set.
int fault(std::string_view call, std::string_view path) noexcept;

/// True if the seam lets this call fail; errno is set then.
inline bool is_faulty(std::string_view name, std::string_view path) noexcept {
  const int error = fault(name, path);
  if (error <= 0) return false;
  errno = error;
  return true;
}

/// Gets each descriptor that this process sends, after it was hashed; null: none.
using DamageHook = void (*)(std::span<std::byte> descriptor);
void set_damage_hook(DamageHook hook) noexcept;
void damage_descriptor(std::span<std::byte> descriptor) noexcept;

/// Calls until it is not interrupted. Negative: errno says why.
template <class Call>
auto try_call(std::string_view name, std::string_view path, const Call& call) -> decltype(call()) {
  for (;;) {
    const auto result = is_faulty(name, path) ? -1 : call();
    if (result >= 0 || errno != EINTR) return result;
  }
}

}  // namespace muster::os
