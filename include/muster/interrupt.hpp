// SPDX-License-Identifier: Apache-2.0
#pragma once
// Lets Ctrl-C of an interpreter end a wait. The signal handler of an interpreter only records the signal, so the
// waiting thread must query it.

namespace muster {

/// Returns true to cancel the current wait of the calling thread. Each waiting thread calls the hook about 16 times per
/// second, including during rendezvous. It must not throw, wait for other ranks or use a group.
using InterruptHook = bool (*)() noexcept;

/// Sets the hook of this process; null removes it. If the hook returns true, the wait ends as with a stop token: the
/// group fails, and all its ranks throw Error(cancelled). Local; any thread.
void set_interrupt_hook(InterruptHook hook) noexcept;

}  // namespace muster
