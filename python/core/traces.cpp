// SPDX-License-Identifier: Apache-2.0
// Spans of the program in traces.

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "muster/trace.hpp"
#include "python/core/bindings.hpp"

namespace muster::python {
namespace {

/// A span, which belongs to the thread that entered it.
struct Span {
  std::string name;
  std::unique_ptr<TraceSpan> running = {};
  std::thread::id thread = {};

  [[nodiscard]] bool is_of_another_thread() const { return running && thread != std::this_thread::get_id(); }
  Span(Span&&) noexcept = default;
  explicit Span(std::string its_name) : name(std::move(its_name)) {}
  ~Span() {
    // The other thread may still access its spans, so this one stays in memory.
    if (is_of_another_thread()) (void)running.release();
  }
};

}  // namespace

void bind_traces(nb::module_& module) {
  nb::class_<Span>(module, "TraceSpan",
                   R"(Names the work inside a `with` block in the trace of this thread (`muster trace`). Local.

Blocks may end in any order, but on the thread on which they began.

Args:
    name: The name. The trace keeps its first 31 bytes.)")
      .def(
          "__init__", [](Span* self, std::string name) { new (self) Span(std::move(name)); }, nb::arg("name"))
      .def(
          "__enter__",
          [](nb::object self) {
            auto& span = nb::cast<Span&>(self);
            if (span.running)
              throw Error(ErrorKind::invalid_argument, "TraceSpan: this span has already begun: create another one");
            span.running = std::make_unique<TraceSpan>(span.name);
            span.thread = std::this_thread::get_id();
            return self;
          },
          nb::sig("def __enter__(self) -> TraceSpan"))
      .def(
          "__exit__",
          [](Span& self, const nb::args&) {
            if (self.is_of_another_thread())
              throw Error(
                  ErrorKind::invalid_argument,
                  "TraceSpan \"" + self.name + "\": the span began on another thread: leave its `with` block there");
            self.running.reset();
          },
          nb::sig("def __exit__(self, *args: object) -> None"))
      .def(
          "add_bytes",
          [](Span& self, std::uint64_t bytes) {
            if (self.running) self.running->add_bytes(bytes);
          },
          nb::arg("bytes"),
          "Adds to the number of bytes of the span, from which its throughput is computed. It has no effect outside of "
          "the `with` block.");
  module.def(
      "is_tracing", [] { return is_tracing(); }, "Returns whether this process writes a trace (MUSTER_TRACE).");
}

}  // namespace muster::python
