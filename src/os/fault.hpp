// SPDX-License-Identifier: Apache-2.0
#pragma once
// The seam through which tests make system calls fail. The following wrappers call it before they call the kernel:
// - Files.
// - Shared memory (memfd_create, open, fcntl, ftruncate, fallocate, fstat, pwrite, mmap), with the path "shared
//   memory".
// - Unix sockets (socket, connect, accept, sendmsg, recvmsg), with the path "a rank's socket", and TCP sockets
//   (socket), with the path "TCP".
// - The check of "the network namespace" (stat).
// - Messages between hosts "about a failure" (send).
//
// From outside a process: MUSTER_FAULT=CALL:ERRNO:NTH[:PATH-PART], such as "pwrite:ENOSPC:3:model-00002". The NTH such
// call (counted from 1; 0: each call) on a path that contains PATH-PART fails with ERRNO, a name or a number.
// "pwrite:short:1" writes fewer bytes than requested, and "pread:short:1" reads fewer.

#include <cerrno>
#include <cstddef>
#include <span>
#include <string_view>

namespace muster::os {

/// Returns the errno with which a call must fail; 0: the call proceeds. `short_transfer` makes pwrite and pread
/// transfer only a part.
using FaultHook = int (*)(std::string_view call, std::string_view path);
inline constexpr int short_transfer = -1;

/// Replaces the hook of this process (null: none). MUSTER_FAULT is then ignored.
void set_fault_hook(FaultHook hook) noexcept;

/// Returns the result of the hook. Without a hook, the cost is one load.
int fault(std::string_view call, std::string_view path) noexcept;

/// Returns true if the seam makes this call fail; errno is then set.
inline bool is_faulty(std::string_view name, std::string_view path) noexcept {
  const int error = fault(name, path);
  if (error <= 0) return false;
  errno = error;
  return true;
}

/// Tests set a function that gets each descriptor which this process sends, after its hash was computed, and the notes
/// of merges and the offers of devices. Null: none.
using DamageHook = void (*)(std::span<std::byte> descriptor);
void set_damage_hook(DamageHook hook) noexcept;
void damage_descriptor(std::span<std::byte> descriptor) noexcept;

/// Repeats the call while it is interrupted. A negative result means failure; errno has the reason.
template <class Call>
auto try_call(std::string_view name, std::string_view path, const Call& call) -> decltype(call()) {
  for (;;) {
    const auto result = is_faulty(name, path) ? -1 : call();
    if (result >= 0 || errno != EINTR) return result;
  }
}

}  // namespace muster::os
