// SPDX-License-Identifier: Apache-2.0
#pragma once
// How an interpreter's Ctrl-C ends a wait: its signal handler only notes the signal, so the thread that waits has to
// ask.

namespace muster {

/// Whether the wait of the calling thread shall end. Asked some 16 times a second by each thread that waits for other
/// ranks, for those that are still to come, too. Must not throw, wait for other ranks, or use a group.
using InterruptHook = bool (*)() noexcept;

/// Makes it the hook of this process; null: none. Where it says true, the wait ends as by a stop token: this rank
/// throws Error(cancelled), and so does each other one, because the group has failed. Local, any thread.
void set_interrupt_hook(InterruptHook hook) noexcept;

}  // namespace muster
