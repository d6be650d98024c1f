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
    throw Error(ErrorKind::invalid_argument,
                "dead_reader: unknown value '" + dead_reader + "' (expected 'fail' or 'drop')");
  if (dead_reader == "drop") options.dead_reader = QueueOptions::DeadReader::drop;
  return options;
}

}  // namespace

void bind_queues(nb::module_& module) {
  module.def("make_queue_handle", &make_queue_handle, nb::arg("ranks"),
             R"(Returns a handle of a queue that a process outside of the group writes. Any process may create it.

Args:
    ranks: The number of ranks of the group that reads the queue, 1 to 255.

Returns:
    One line of text, which all ranks and the writer use for a single queue.

Raises:
    InvalidArgumentError: `ranks` is out of range.)");
  nb::class_<Closable<MessageQueue>> type(
      module, "MessageQueue",
      R"(A queue in shared memory: one rank of a group writes, and the others read every message in order.

Messages have any length. One thread at a time uses a queue. A reader still receives the messages that a dead writer
has written. Creating a queue is collective: all ranks of the group, on one host, pass the same options.

Args:
    group: A muster.Group, a process group of torch.distributed, or None for the world.
    writer: The rank that writes.
    reader: The only rank that reads. None: all ranks except the writer.
    capacity: The bytes that the slowest reader may be behind. None: 4 MiB.
    dead_reader: The effect of a dead reader on the writer: 'fail' raises PeerLostError, and 'drop' ignores it.
    external_writer: The handle of a writer that is not a rank and calls MessageQueue.attach_writer().
    timeout: The longest wait in seconds. None: the default of the group.

Raises:
    InvalidArgumentError: An argument is invalid. All ranks raise it.
    RankMismatchError: The options of the ranks differ. All ranks raise it.
    UnsupportedError: The ranks do not share memory.
    TimeoutError: A rank did not arrive.
    PeerLostError: A rank died or left.
    CancelledError: The wait was interrupted.)");
  type.def(
          "__init__",
          [](Closable<MessageQueue>* self, nb::handle group, nb::handle writer, nb::handle reader, nb::handle capacity,
             nb::handle dead_reader, nb::handle external_writer, nb::handle timeout) {
            const auto made = group_of(group);
            const QueueOptions options = made_for(*made, [&] {
              QueueOptions given = options_of(capacity, dead_reader, timeout);
              given.writer = argument_of<int>(writer, "writer");
              given.reader = argument_of<std::optional<int>>(reader, "reader");
              given.external_writer = argument_of<std::string>(external_writer, "external_writer");
              return given;
            });
            new (self)
                Closable<MessageQueue>(without_gil([&] { return std::make_shared<MessageQueue>(*made, options); }));
          },
          nb::arg("group").none() = nb::none(), nb::arg("writer").none() = 0, nb::kw_only(),
          nb::arg("reader").none() = nb::none(), nb::arg("capacity").none() = nb::none(),
          nb::arg("dead_reader").none() = "fail", nb::arg("external_writer").none() = "",
          nb::arg("timeout").none() = nb::none(),
          nb::sig(
              "def __init__(self, group: typing.Any = None, writer: int = 0, *, reader: int | None = None, capacity: "
              "int | str | None = None, dead_reader: typing.Literal['fail', 'drop'] = 'fail', external_writer: str = "
              "'', timeout: float | None = None) -> None"))
      .def_static(
          "attach_writer",
          [](const std::string& handle, nb::handle capacity, nb::handle dead_reader, nb::handle timeout) {
            QueueOptions options = options_of(capacity, dead_reader, timeout);
            options.external_writer = handle;
            return Closable<MessageQueue>(
                without_gil([&] { return std::make_shared<MessageQueue>(MessageQueue::attach_writer(options)); }));
          },
          nb::arg("handle"), nb::kw_only(), nb::arg("capacity").none() = nb::none(), nb::arg("dead_reader") = "fail",
          nb::arg("timeout") = nb::none(),
          nb::sig("def attach_writer(handle: str, *, capacity: int | str | None = None, dead_reader: "
                  "typing.Literal['fail', 'drop'] = 'fail', timeout: float | None = None) -> MessageQueue"),
          R"(Returns the writing end of a queue, in a process that is not a rank. The options and the errors are those of
the ranks.

Args:
    handle: The handle, which make_queue_handle() returned.)")
      .def(
          "put",
          [](MessageQueue& self, const nb::bytes& message, Seconds timeout) {
            const std::span bytes(static_cast<const std::byte*>(message.data()), message.size());
            without_gil([&] { self.put(bytes, {.timeout = timeout_of(timeout)}); });
          },
          nb::arg("message"), nb::kw_only(), nb::arg("timeout") = nb::none(),
          R"(Writes a message, which each reader receives by get(). It waits while the slowest reader is too far behind.
Only the writer may call it.

Raises:
    InvalidArgumentError: This process is not the writer.
    TimeoutError: A reader made no progress.
    PeerLostError: A reader died or left.
    CancelledError: The wait was interrupted.)")
      .def(
          "get",
          [](MessageQueue& self, Seconds timeout) {
            const auto message = without_gil([&] { return self.get({.timeout = timeout_of(timeout)}); });
            return nb::bytes(message.data(), message.size());
          },
          nb::kw_only(), nb::arg("timeout") = nb::none(),
          R"(Returns the next message of put(), as bytes. Only a reader may call it.

Raises:
    InvalidArgumentError: This process is not a reader.
    TimeoutError: No message arrived.
    PeerLostError: The writer died or left.
    CancelledError: The wait was interrupted.)")
      .def(
          "put_config",
          [](MessageQueue& self, nb::handle config, Seconds timeout) {
            const Config made = config_of(config);
            without_gil([&] { self.put_config(made, {.timeout = timeout_of(timeout)}); });
          },
          nb::arg("config").none(), nb::kw_only(), nb::arg("timeout") = nb::none(),
          "Writes a config, which each reader receives by get_config(). Otherwise as put().")
      .def(
          "get_config",
          [](MessageQueue& self, Seconds timeout) -> Any {
            return object_of(without_gil([&] { return self.get_config({.timeout = timeout_of(timeout)}); }));
          },
          nb::kw_only(), nb::arg("timeout") = nb::none(),
          "Returns the next config of put_config(). Otherwise as get(). Tensors of a large config are in memory of the "
          "writer, read-only.")
      .def(
          "has_message", [](const MessageQueue& self) { return self.has_message(); },
          "Returns whether a message has arrived. It does not wait. Only a reader may call it.");
  def_closing<MessageQueue>(type,
                            R"(Leaves the queue and releases its memory. Local; a second call does nothing.

Later calls raise InvalidArgumentError here. Readers still receive the messages that were written before. Configs that
were received remain valid. `with` closes the queue at the end of its block.)",
                            "def __enter__(self) -> MessageQueue");
}

}  // namespace muster::python
