// SPDX-License-Identifier: Apache-2.0
// muster.MessageQueue.

#include <optional>
#include <span>
#include <string>

#include "muster/error.hpp"
#include "muster/message_queue.hpp"
#include "python/core/arguments.hpp"
#include "python/core/bindings.hpp"
#include "python/core/waiting.hpp"

namespace muster::python {
namespace {

using Seconds = std::optional<double>;

QueueOptions options_of(nb::handle capacity, nb::handle dead, nb::handle timeout) {
  QueueOptions options;
  options.wait = {.timeout = timeout_of(argument_of<Seconds>(timeout, "timeout"))};
  if (!capacity.is_none()) options.capacity = bytes_of(capacity);
  const auto dead_reader = argument_of<std::string>(dead, "dead_reader");
  if (dead_reader != "fail" && dead_reader != "drop")
    throw Error(ErrorKind::invalid_argument, "dead_reader is 'fail' or 'drop', not '" + dead_reader + "'");
  if (dead_reader == "drop") options.dead_reader = QueueOptions::DeadReader::drop;
  return options;
}

}  // namespace

void bind_queues(nb::module_& module) {
  module.def("make_queue_handle", &make_queue_handle, nb::arg("ranks"),
             "Returns a handle of a queue that `ranks` ranks of a group read and a process outside of the group "
             "writes. It is one line of text that all of them use, for a single queue. Any process may create it.");
  nb::class_<MessageQueue>(
      module, "MessageQueue",
      "A queue in shared memory: one rank of a group writes, and the others read every message in order. `reader`: the "
      "only rank that reads. Creating it is collective: all ranks of the group, on one host, pass the same options. "
      "`capacity`: bytes that the slowest reader may be behind (None: 4 MiB). `dead_reader`: 'fail' or 'drop', the "
      "effect of a dead reader on the writer. `external_writer`: the handle of a writer that is not a rank and calls "
      "MessageQueue.attach_writer(). Messages have any length, and one thread at a time uses a queue.\n\nRaises "
      "ArgumentError and RankMismatchError on all ranks, UnsupportedError if ranks share no memory, and TimeoutError, "
      "PeerLostError or CancelledError in waits. A reader still receives the messages that a dead writer has written.")
      .def(
          "__init__",
          [](MessageQueue* self, nb::handle group, const Given<int>& writer, const Given<std::optional<int>>& reader,
             nb::handle capacity, const Given<std::string>& dead_reader, const Given<std::string>& external_writer,
             const Given<Seconds>& timeout) {
            const auto made = group_of(group);
            const QueueOptions options = made_for(*made, [&] {
              QueueOptions given = options_of(capacity, dead_reader, timeout);
              given.writer = argument_of<int>(writer, "writer");
              given.reader = argument_of<std::optional<int>>(reader, "reader");
              given.external_writer = argument_of<std::string>(external_writer, "external_writer");
              return given;
            });
            new (self) MessageQueue(without_gil([&] { return MessageQueue(*made, options); }));
          },
          nb::arg("group").none() = nb::none(), nb::arg("writer") = 0, nb::kw_only(), nb::arg("reader") = nb::none(),
          nb::arg("capacity").none() = nb::none(), nb::arg("dead_reader") = "fail", nb::arg("external_writer") = "",
          nb::arg("timeout") = nb::none())
      .def_static(
          "attach_writer",
          [](const std::string& handle, nb::handle capacity, nb::handle dead_reader, nb::handle timeout) {
            QueueOptions options = options_of(capacity, dead_reader, timeout);
            options.external_writer = handle;
            return without_gil([&] { return MessageQueue::attach_writer(options); });
          },
          nb::arg("handle"), nb::kw_only(), nb::arg("capacity").none() = nb::none(), nb::arg("dead_reader") = "fail",
          nb::arg("timeout") = nb::none(),
          "Returns the writing end, in a process that is not a rank. The options are those of the ranks.")
      .def(
          "put",
          [](MessageQueue& self, const nb::bytes& message, Seconds timeout) {
            const std::span bytes(static_cast<const std::byte*>(message.data()), message.size());
            without_gil([&] { self.put(bytes, {.timeout = timeout_of(timeout)}); });
          },
          nb::arg("message"), nb::kw_only(), nb::arg("timeout") = nb::none(),
          "Writer only: sends bytes, which each reader receives by get(). Waits while the slowest reader is too far "
          "behind.")
      .def(
          "get",
          [](MessageQueue& self, Seconds timeout) {
            const auto message = without_gil([&] { return self.get({.timeout = timeout_of(timeout)}); });
            return nb::bytes(message.data(), message.size());
          },
          nb::kw_only(), nb::arg("timeout") = nb::none(), "Reader only: returns the next message of put(), as bytes.")
      .def(
          "put_config",
          [](MessageQueue& self, nb::handle config, Seconds timeout) {
            const Config made = config_of(config);
            without_gil([&] { self.put_config(made, {.timeout = timeout_of(timeout)}); });
          },
          nb::arg("config").none(), nb::kw_only(), nb::arg("timeout") = nb::none(),
          "Writer only: sends a config, which each reader receives by get_config().")
      .def(
          "get_config",
          [](MessageQueue& self, Seconds timeout) {
            return object_of(without_gil([&] { return self.get_config({.timeout = timeout_of(timeout)}); }));
          },
          nb::kw_only(), nb::arg("timeout") = nb::none(),
          "Reader only: returns the next message of put_config(). Tensors of a large one are in memory of the writer, "
          "read-only.")
      .def("has_message", &MessageQueue::has_message,
           "Reader only: returns whether a message has arrived. Does not wait.");
}

}  // namespace muster::python
