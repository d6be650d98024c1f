// SPDX-License-Identifier: Apache-2.0
#pragma once
// Calls that may wait: they release the GIL, and Ctrl-C ends them.

#include <nanobind/nanobind.h>

#include <type_traits>

namespace muster::python {

/// Releases the GIL of this thread while it exists. Waits of this thread then check for signals (muster/interrupt.hpp).
class Waiting {
 public:
  Waiting() noexcept;
  ~Waiting();
  Waiting& operator=(Waiting&&) = delete;

 private:
  friend bool ask_for_signals() noexcept;
  PyThreadState* state_;
  Waiting* outer_;
};

/// Holds the GIL again while it exists, inside a call that has released it: for callbacks of the library.
class InPython {
 public:
  InPython() noexcept;
  ~InPython();
  InPython& operator=(InPython&&) = delete;

 private:
  Waiting* outer_;
  PyGILState_STATE state_;
};

/// Acquires the GIL on any thread, including threads created by C++. Never returns if the interpreter is shutting down.
PyGILState_STATE ensured_gil() noexcept;

/// Sets the exception of a signal handler (KeyboardInterrupt) as the current Python exception, if a wait of this thread
/// has received one.
bool restore_interrupt() noexcept;

/// Returns call(), run without the GIL. Throws the exception that a signal handler has raised in the meantime.
template <class Call>
auto without_gil(const Call& call) {
  const auto end = [] {
    if (restore_interrupt()) throw nanobind::python_error();
  };
  if constexpr (std::is_void_v<std::invoke_result_t<const Call&>>) {
    {
      const Waiting waiting;
      call();
    }
    end();
  } else {
    auto result = [&] {
      const Waiting waiting;
      return call();
    }();
    end();
    return result;
  }
}

/// Installs the interrupt hook that checks for Python signals.
void install_interrupt_hook();

}  // namespace muster::python
