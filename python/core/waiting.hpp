// SPDX-License-Identifier: Apache-2.0
#pragma once
// Calls that may wait: without the GIL, and Ctrl-C ends them.

#include <nanobind/nanobind.h>

#include <type_traits>

namespace muster::python {

/// While it lives, this thread has not the GIL, and its waits ask for signals (muster/interrupt.hpp).
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

/// While it lives, this thread has the GIL again, inside a call that lets it go: for what the library calls back.
class InPython {
 public:
  InPython() noexcept;
  ~InPython();
  InPython& operator=(InPython&&) = delete;

 private:
  Waiting* outer_;
  PyGILState_STATE state_;
};

/// Takes the GIL on a thread that may be one of C++. Never returns if the interpreter is ending.
PyGILState_STATE ensured_gil() noexcept;

/// Makes the exception of a signal's handler (KeyboardInterrupt) Python's current one, if this thread's wait has met
/// one.
bool restore_interrupt() noexcept;

/// call() without the GIL. Throws what a signal's handler has raised meanwhile.
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

/// Makes the hook of this process the one that asks Python.
void install_interrupt_hook();

}  // namespace muster::python
