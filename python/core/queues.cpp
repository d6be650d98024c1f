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
  options.waits = {.timeout = timeout_of(argument_of<Seconds>(timeout, "timeout"))};
  if (!capacity.is_none()) options.capacity = bytes_of(capacity);
  const auto dead_reader = argument_of<std::string>(dead, "dead_reader");
  if (dead_reader != "fail" && dead_reader != "drop")
    throw Error(ErrorKind::argument, "dead_reader is 'fail' or 'drop', not '" + dead_reader + "'");
  if (dead_reader == "drop") options.dead_reader = QueueOptions::DeadReader::drop;
  return options;
}

}  // namespace

void bind_queues(nb::module_& module) {
  module.def("queue_handle", &queue_handle, nb::arg("ranks"),
             "The handle of a queue that so many ranks of a group read and a process outside of it writes: one line of "
             "text for all of them, good for one queue. Any process makes it.");
  nb::class_<MessageQueue>(
      module, "MessageQueue",
      "One rank of a group writes, the others read every message, in order, over shared memory; `reader`: this one "
      "alone. Collective to make: all ranks of the group, on one host, give the same options. `capacity`: bytes that "
      "the slowest reader may be behind (None: 4 MiB). `dead_reader`: 'fail' or 'drop', what one is to the writer. "
      "`outside_writer`: the handle of a writer that is no rank, which calls MessageQueue.write_from_outside(). "
      "Messages are of any length, and one thread at a time uses a queue.\n\n"
      "Raises ArgumentError and RankMismatchError on all ranks, UnsupportedError if ranks share no memory; "
      "TimeoutError, PeerLostError and CancelledError of waits. A reader gets what a dead writer has written before.")
      .def(
          "__init__",
          [](MessageQueue* self, nb::handle group, const Given<int>& writer, const Given<std::optional<int>>& reader,
             nb::handle capacity, const Given<std::string>& dead_reader, const Given<std::string>& outside_writer,
             const Given<Seconds>& timeout) {
            const auto made = group_of(group);
            const QueueOptions options = made_for(*made, [&] {
              QueueOptions given = options_of(capacity, dead_reader, timeout);
              given.writer = argument_of<int>(writer, "writer");
              given.reader = argument_of<std::optional<int>>(reader, "reader");
              given.outside_writer = argument_of<std::string>(outside_writer, "outside_writer");
              return given;
            });
            new (self) MessageQueue(without_gil([&] { return MessageQueue(*made, options); }));
          },
          nb::arg("group").none() = nb::none(), nb::arg("writer") = 0, nb::kw_only(), nb::arg("reader") = nb::none(),
          nb::arg("capacity").none() = nb::none(), nb::arg("dead_reader") = "fail", nb::arg("outside_writer") = "",
          nb::arg("timeout") = nb::none())
      .def_static(
          "write_from_outside",
          [](const std::string& handle, nb::handle capacity, nb::handle dead_reader, nb::handle timeout) {
            QueueOptions options = options_of(capacity, dead_reader, timeout);
            options.outside_writer = handle;
            return without_gil([&] { return MessageQueue::write_from_outside(options); });
          },
          nb::arg("handle"), nb::kw_only(), nb::arg("capacity").none() = nb::none(), nb::arg("dead_reader") = "fail",
          nb::arg("timeout") = nb::none(), "The writer's end, in a process that is no rank; options as the ranks'.")
      .def(
          "put",
          [](MessageQueue& self, const nb::bytes& message, Seconds timeout) {
            const std::span bytes(static_cast<const std::byte*>(message.data()), message.size());
            without_gil([&] { self.put(bytes, {.timeout = timeout_of(timeout)}); });
          },
          nb::arg("message"), nb::kw_only(), nb::arg("timeout") = nb::none(),
          "The writer's: bytes, which get() gives each reader. Waits if the slowest is too far behind.")
      .def(
          "get",
          [](MessageQueue& self, Seconds timeout) {
            const auto message = without_gil([&] { return self.get({.timeout = timeout_of(timeout)}); });
            return nb::bytes(message.data(), message.size());
          },
          nb::kw_only(), nb::arg("timeout") = nb::none(), "A reader's: the next message of put(), as bytes.")
      .def(
          "put_config",
          [](MessageQueue& self, nb::handle config, Seconds timeout) {
            const Config made = config_of(config);
            without_gil([&] { self.put_config(made, {.timeout = timeout_of(timeout)}); });
          },
          nb::arg("config").none(), nb::kw_only(), nb::arg("timeout") = nb::none(),
          "The writer's: a config, which get_config() gives each reader.")
      .def(
          "get_config",
          [](MessageQueue& self, Seconds timeout) {
            return object_of(without_gil([&] { return self.get_config({.timeout = timeout_of(timeout)}); }));
          },
          nb::kw_only(), nb::arg("timeout") = nb::none(),
          "A reader's: the next message of put_config(). Tensors of a large one are the writer's memory, read-only.")
      .def("has_message", &MessageQueue::has_message, "A reader's: whether there is a message. Never waits.");
}

}  // namespace muster::python
