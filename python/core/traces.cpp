// SPDX-License-Identifier: Apache-2.0
// Spans of the program in traces.

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "muster/trace.hpp"
#include "python/core/bindings.hpp"

namespace muster::python {
namespace {

struct Span {
  std::string name;
  std::optional<TraceSpan> running = {};
};

}  // namespace

void bind_traces(nb::module_& module) {
  nb::class_<Span>(module, "TraceSpan",
                   "What this thread is in while the `with` lasts, for `muster trace`: a name, of which the first 31 "
                   "bytes count, inside of the spans that have begun before. Local. Once at a time.")
      .def(
          "__init__", [](Span* self, std::string name) { new (self) Span{std::move(name)}; }, nb::arg("name"))
      .def("__enter__",
           [](nb::object self) {
             auto& span = nb::cast<Span&>(self);
             if (span.running) throw Error(ErrorKind::argument, "this span has begun already: make another one");
             span.running.emplace(span.name);
             return self;
           })
      .def("__exit__", [](Span& self, const nb::args&) { self.running.reset(); })
      .def(
          "add_bytes",
          [](Span& self, std::uint64_t bytes) {
            if (self.running) self.running->add_bytes(bytes);
          },
          nb::arg("bytes"), "Bytes that the span is about: for its throughput.");
  module.def(
      "is_tracing", [] { return is_tracing(); }, "Whether this process writes a trace (MUSTER_TRACE).");
}

}  // namespace muster::python
