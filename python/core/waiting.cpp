// SPDX-License-Identifier: Apache-2.0
#include "python/core/waiting.hpp"

#include <cxxabi.h>
#include <unistd.h>

#include <chrono>
#include <utility>

#include "muster/interrupt.hpp"

namespace muster::python {
namespace {

using Clock = std::chrono::steady_clock;

/// Waits that iterate often need not acquire the GIL in each iteration.
constexpr std::chrono::milliseconds between_asks{40};

thread_local Waiting* current = nullptr;
thread_local Clock::time_point asked;
struct Raised {
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* trace = nullptr;
};
thread_local Raised raised;

/// Acquires the GIL. If the interpreter is shutting down, Python before 3.14 ends the thread by forced unwinding, which
/// would abort the process in a destructor or a C function. Instead, as in Python 3.14, this thread blocks here until
/// the process exits.
template <class Take>
auto taken(const Take& take) noexcept -> decltype(take()) {
  try {
    return take();
  } catch (const abi::__forced_unwind&) {
    for (;;) ::pause();
  }
}

}  // namespace

Waiting::Waiting() noexcept : state_(PyEval_SaveThread()), outer_(current) {
  current = this;
}

Waiting::~Waiting() {
  current = outer_;
  taken([&] { PyEval_RestoreThread(state_); });
}

// A wait inside Python code does not release the GIL again.
InPython::InPython() noexcept : outer_(std::exchange(current, nullptr)), state_(ensured_gil()) {}

InPython::~InPython() {
  PyGILState_Release(state_);
  current = outer_;
}

PyGILState_STATE ensured_gil() noexcept {
  return taken([] { return PyGILState_Ensure(); });
}

bool ask_for_signals() noexcept {
  if (current == nullptr) return false;
  if (raised.type != nullptr) return true;
  const Clock::time_point now = Clock::now();
  if (now - asked < between_asks) return false;
  asked = now;
  // Only the main thread runs signal handlers; on other threads this does nothing.
  taken([&] { PyEval_RestoreThread(current->state_); });
  if (PyErr_CheckSignals() != 0) PyErr_Fetch(&raised.type, &raised.value, &raised.trace);
  current->state_ = PyEval_SaveThread();
  return raised.type != nullptr;
}

bool restore_interrupt() noexcept {
  if (raised.type == nullptr) return false;
  PyErr_Restore(raised.type, raised.value, raised.trace);
  raised = {};
  return true;
}

void install_interrupt_hook() {
  set_interrupt_hook(ask_for_signals);
}

}  // namespace muster::python
