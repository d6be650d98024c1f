// SPDX-License-Identifier: Apache-2.0
#pragma once
// The seam where tests let system calls fail: the wrappers of files, shared memory (memfd_create, ftruncate, fallocate,
// mmap; their path is "shared memory") and Unix sockets (socket, accept, recvmsg; "a rank's socket") ask here before
// they call the kernel.
//
// From outside a process: MUSTER_FAULT=CALL:ERRNO:NTH[:PATH-PART], such as "pwrite:ENOSPC:3:model-00002". The NTH such
// call (from 1 on; 0: each) on a path that has PATH-PART in it fails with ERRNO, a name or a number. "pwrite:short:1"
// writes less than was asked for, "pread:short:1" reads less.

#include <string_view>

namespace muster::os {

/// The errno that a call shall fail with, 0 for none; `short_transfer` lets pwrite and pread move a part.
using FaultHook = int (*)(std::string_view call, std::string_view path);
inline constexpr int short_transfer = -1;

/// Replaces the hook of this process (null: none); MUSTER_FAULT is not looked at any more.
void set_fault_hook(FaultHook hook) noexcept;

/// What the hook says. Nothing but a load where none is set.
int fault(std::string_view call, std::string_view path) noexcept;

}  // namespace muster::os
