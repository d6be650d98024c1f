// SPDX-License-Identifier: Apache-2.0
// muster.ProcessGroup: collectives and messages.

#include <fmt/core.h>
#include <nanobind/stl/pair.h>

#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "muster/process_group.hpp"
#include "python/core/arguments.hpp"
#include "python/core/bindings.hpp"
#include "python/core/process_groups.hpp"
#include "python/core/waiting.hpp"
#include "src/group/error_propagation.hpp"

namespace muster::python {
namespace {

using Seconds = std::optional<double>;
using Sizes = std::vector<std::int64_t>;
using Number = std::optional<int>;

bool is_list(nb::handle object) {
  return PyList_Check(object.ptr()) != 0 || PyTuple_Check(object.ptr()) != 0;
}

std::vector<Tensor> tensors_of(nb::handle objects) {
  std::vector<Tensor> tensors;
  if (!objects.is_none())
    for (const nb::handle each : nb::iter(objects)) tensors.push_back(tensor_of(each));
  return tensors;
}

/// One tensor for all ranks, or a list of one tensor per rank.
using TensorOrList = std::variant<Tensor, std::vector<Tensor>>;
TensorOrList tensor_or_list_of(nb::handle given) {
  if (given.is_none() || is_list(given)) return tensors_of(given);
  return tensor_of(given);
}

ReduceOp op_of(nb::handle op) {
  const auto name = argument_of<std::string>(op, "op");
  if (name == "sum") return ReduceOp::sum;
  if (name == "product") return ReduceOp::product;
  if (name == "min") return ReduceOp::min;
  if (name == "max") return ReduceOp::max;
  if (name == "average") return ReduceOp::average;
  throw Error(ErrorKind::invalid_argument,
              fmt::format("op: unknown value '{}' (expected 'sum', 'product', 'min', 'max' or 'average')", name));
}

/// Converts a result to Python objects.
template <class Result>
Result python_of(Result result) {
  return result;
}
List python_of(const std::vector<Config>& configs) {
  nb::list list;
  for (const Config& config : configs) list.append(object_of(config));
  return list;
}
nb::tuple python_of(const ReceivedConfig& received) {
  return nb::make_tuple(object_of(received.config), received.from, received.tag);
}

/// A parameter: its Python name, and make(object), which converts it to the argument of the library. `type` is its type
/// in the stub, with its default.
template <class Name, class Make>
struct Parameter {
  Name name;
  const char* type;
  Make make;
  using Object = nb::handle;
};

/// Any object is accepted, because all ranks raise the error about a wrong one.
auto named(const char* name) {
  return nb::arg(name).none();
}

template <class Value>
constexpr const char* type_text = nullptr;
template <>
constexpr const char* type_text<int> = "int";
template <>
constexpr const char* type_text<Sizes> = "collections.abc.Sequence[int]";

template <class Value>
auto value(const char* name) {
  return Parameter{named(name), type_text<Value>, [name](nb::handle given) { return argument_of<Value>(given, name); }};
}
/// A number that is 0 by default.
template <class Value>
auto value_or_0(const char* name) {
  return Parameter{named(name) = 0, "int = 0", [name](nb::handle given) { return argument_of<Value>(given, name); }};
}
auto tensor(const char* name) {
  return Parameter{named(name), "muster._typing.TensorLike", [](nb::handle given) { return tensor_of(given); }};
}
auto config() {
  return Parameter{named("config"), "typing.Any", [](nb::handle given) { return config_of(given); }};
}
auto reduction() {
  return Parameter{named("op") = "sum", "muster._typing.ReduceOpLike = 'sum'", op_of};
}
auto all_sizes() {
  return Parameter{named("sizes") = nb::none(), "collections.abc.Sequence[int] | None = None",
                   [](nb::handle given) { return argument_of<std::optional<Sizes>>(given, "sizes"); }};
}
auto sender() {
  return Parameter{named("source"), "int | None",
                   [](nb::handle given) { return argument_of<Number>(given, "source").value_or(any_rank); }};
}
auto received_tag() {
  return Parameter{named("tag") = 0, "int | None = 0",
                   [](nb::handle given) { return argument_of<Number>(given, "tag").value_or(any_tag); }};
}
auto tensors(const char* name) {
  return Parameter{named(name), "collections.abc.Sequence[muster._typing.TensorLike] | None", tensors_of};
}
auto tensor_or_list(const char* name) {
  return Parameter{named(name),
                   "muster._typing.TensorLike | collections.abc.Sequence[muster._typing.TensorLike] | None",
                   tensor_or_list_of};
}

/// The type of a result in the stub.
template <class Result>
constexpr const char* result_text = "None";
template <>
constexpr const char* result_text<int> = "int";
template <>
constexpr const char* result_text<Tensor> = "Tensor";
template <>
constexpr const char* result_text<std::optional<Tensor>> = "Tensor | None";
template <>
constexpr const char* result_text<std::pair<Tensor, Sizes>> = "tuple[Tensor, list[int]]";
template <>
constexpr const char* result_text<std::vector<Config>> = "list[typing.Any]";
template <>
constexpr const char* result_text<ReceivedConfig> = "tuple[typing.Any, int, int]";
template <>
constexpr const char* result_text<Work<void>> = "SendWork";
template <>
constexpr const char* result_text<Work<int>> = "ReceiveWork";
template <>
constexpr const char* result_text<Work<ReceivedConfig>> = "ReceiveConfigWork";

enum class Kind : std::uint8_t {
  collective,  ///< all ranks make the call; all raise an error about the arguments of one rank
  message,     ///< between two ranks: only this rank raises an error about its arguments
  begun,       ///< a message without waiting: call() returns its Work, which keeps the group alive
};

/// Defines a call of a process group: call(self, arguments..., options). The GIL is released if the call may wait.
template <Kind kind, class Call, class... Parameters>
void def(nb::class_<Closable<ProcessGroup>>& group, const char* name, const char* words, Call call,
         Parameters... parameters) {
  const auto bound = [call, ... make = parameters.make](ProcessGroup& self, typename Parameters::Object... given,
                                                        nb::handle timeout) {
    // Braces evaluate the arguments in the order of the parameters.
    const auto make_all = [&] { return std::tuple{make(given)..., collective_options_of(timeout)}; };
    const auto arguments = [&] {
      if constexpr (kind == Kind::collective)
        return made_in(self, make_all);
      else
        return make_all();
    }();
    const auto run = [&] { return std::apply([&](const auto&... each) { return call(self, each...); }, arguments); };
    if constexpr (kind == Kind::begun)
      return run();
    else if constexpr (std::is_void_v<decltype(run())>)
      without_gil(run);
    else
      return python_of(without_gil(run));
  };
  using Result = std::invoke_result_t<Call&, ProcessGroup&,
                                      std::decay_t<std::invoke_result_t<decltype(parameters.make)&, nb::handle>>...,
                                      const CollectiveOptions&>;
  std::string signature = fmt::format("def {}(self, ", name);
  ((signature += fmt::format("{}: {}, ", parameters.name.name_, parameters.type)), ...);
  signature += fmt::format("*, timeout: float | None = None) -> {}", result_text<Result>);
  const auto timeout = nb::arg("timeout").none() = nb::none();
  if constexpr (kind == Kind::begun)
    group.def(name, bound, nb::keep_alive<0, 1>(), parameters.name..., nb::kw_only(), timeout,
              nb::sig(signature.c_str()), words);
  else
    group.def(name, bound, parameters.name..., nb::kw_only(), timeout, nb::sig(signature.c_str()), words);
}

template <class Result>
void bind_work(nb::module_& module, const char* name, const char* get) {
  nb::class_<Work<Result>>(module, name, "An operation that was started without waiting for it.")
      .def(
          "is_done", [](const Work<Result>& self) { return self.is_done(); },
          "Returns whether the operation has ended. It does not wait.")
      .def(
          "wait",
          [](const Work<Result>& self, double seconds) {
            const auto longest = *timeout_of(seconds);
            return without_gil([&] { return self.wait_for(longest); });
          },
          nb::arg("timeout"),
          "Waits until the operation has ended, for at most `timeout` seconds. Returns whether it has ended.")
      .def(
          "get",
          [](Work<Result>& self) -> nb::object {
            if constexpr (std::is_void_v<Result>) {
              without_gil([&] { self.get(); });
              return nb::none();
            } else {
              return nb::cast(python_of(without_gil([&] { return self.get(); })));
            }
          },
          nb::sig(get),
          "Waits until the operation has ended, and returns its result or raises its error. Call it once.");
}

void bind_collectives_in_place(nb::class_<Closable<ProcessGroup>>& group) {
  def<Kind::collective>(
      group, "all_reduce", "Reduces the tensors of all ranks in place by `op`, with the same bits on all ranks.",
      [](ProcessGroup& self, const auto&... given) { self.all_reduce(given...); }, tensor("tensor"), reduction());
  def<Kind::collective>(
      group, "all_reduce_into",
      "Writes the result of all_reduce() into `out`, which has the dtype and shape of `tensor`.",
      [](ProcessGroup& self, const auto&... given) { self.all_reduce_into(given...); }, tensor("out"), tensor("tensor"),
      reduction());
  def<Kind::collective>(
      group, "reduce",
      "Reduces the tensors of all ranks into the tensor of `root`. The tensors of the other ranks are not changed.",
      [](ProcessGroup& self, const auto&... given) { self.reduce(given...); }, tensor("tensor"), value<int>("root"),
      reduction());
  def<Kind::collective>(
      group, "broadcast", "Copies the elements of `root` into the tensor of every rank.",
      [](ProcessGroup& self, const auto&... given) { self.broadcast(given...); }, tensor("tensor"), value<int>("root"));
  def<Kind::collective>(
      group, "reduce_scatter_into",
      "Reduces the tensors of all ranks, splits the result along dimension 0 into size equal slices, and writes the "
      "slice of this rank into `out`.",
      [](ProcessGroup& self, const auto&... given) { self.reduce_scatter_into(given...); }, tensor("out"),
      tensor("tensor"), reduction());
  def<Kind::collective>(
      group, "all_gather_into",
      "Gathers the tensors of all ranks into `out` on every rank. `out` is one tensor, size times as long along "
      "dimension 0, or a list of one tensor per rank, whose extents of dimension 0 may differ.",
      [](ProcessGroup& self, const TensorOrList& out, const auto&... given) {
        std::visit([&](const auto& to) { self.all_gather_into(to, given...); }, out);
      },
      tensor_or_list("out"), tensor("tensor"));
  def<Kind::collective>(
      group, "gather_into",
      "Gathers the tensors of all ranks into `out` on `root`. `out` is a list of one tensor per rank on `root` and "
      "None on the other ranks, or one tensor on all ranks.",
      [](ProcessGroup& self, const TensorOrList& out, const auto&... given) {
        std::visit([&](const auto& to) { self.gather_into(to, given...); }, out);
      },
      tensor_or_list("out"), tensor("tensor"), value<int>("root"));
  def<Kind::collective>(
      group, "scatter",
      "Copies the part of this rank from `root` into `out`. `parts` has one tensor per rank on `root` and is None on "
      "the other ranks.",
      [](ProcessGroup& self, const Tensor& out, const std::vector<Tensor>& parts, const auto&... given) {
        self.scatter(out, std::vector<TensorView>(parts.begin(), parts.end()), given...);
      },
      tensor("out"), tensors("parts"), value<int>("root"));
  def<Kind::collective>(
      group, "all_to_all_into",
      "Writes the result of all_to_all() into `out`, which has the dtype and shape of `tensor` and does not overlap "
      "it.",
      [](ProcessGroup& self, const auto&... given) { self.all_to_all_into(given...); }, tensor("out"),
      tensor("tensor"));
}

void bind_collectives_with_results(nb::class_<Closable<ProcessGroup>>& group) {
  def<Kind::collective>(
      group, "all_reduce_shared", "Returns one reduced tensor that all ranks of a host map, read-only.",
      [](ProcessGroup& self, const auto&... given) { return self.all_reduce_shared(given...); }, tensor("tensor"),
      reduction());
  def<Kind::collective>(
      group, "all_gather_shared",
      "Returns the tensors of all ranks, concatenated along dimension 0, as one tensor that all ranks of a host map, "
      "read-only.",
      [](ProcessGroup& self, const auto&... given) { return self.all_gather_shared(given...); }, tensor("tensor"));
  def<Kind::collective>(
      group, "reduce_scatter",
      "Reduces the tensors of all ranks, splits the result along `dim`, and returns the slice of this rank. `sizes`: "
      "the extents of all slices; None: equal ones.",
      [](ProcessGroup& self, const Tensor& own, int dim, ReduceOp op, const std::optional<Sizes>& sizes,
         const auto& options) {
        return sizes ? self.reduce_scatterv(own, *sizes, dim, op, options) : self.reduce_scatter(own, dim, op, options);
      },
      tensor("tensor"), value_or_0<int>("dim"), reduction(), all_sizes());
  def<Kind::collective>(
      group, "all_gather",
      "Returns the tensors of all ranks, of one dtype and shape, concatenated along `dim` in rank order, on all ranks.",
      [](ProcessGroup& self, const auto&... given) { return self.all_gather(given...); }, tensor("tensor"),
      value_or_0<int>("dim"));
  def<Kind::collective>(
      group, "all_gatherv",
      "Gathers as all_gather() does, except that the extents along `dim` may differ. `sizes`: the extents of all "
      "ranks, if they are known.",
      [](ProcessGroup& self, const Tensor& own, int dim, const std::optional<Sizes>& sizes, const auto& options) {
        return self.all_gatherv(own, dim, sizes.value_or(Sizes{}), options);
      },
      tensor("tensor"), value_or_0<int>("dim"), all_sizes());
  def<Kind::collective>(
      group, "gather",
      "Returns the tensors of all ranks, concatenated along `dim`, on `root`, and None on the other ranks.",
      [](ProcessGroup& self, const auto&... given) { return self.gather(given...); }, tensor("tensor"),
      value<int>("root"), value_or_0<int>("dim"));
  def<Kind::collective>(
      group, "gatherv", "Gathers as gather() does, except that the extents along `dim` may differ.",
      [](ProcessGroup& self, const auto&... given) { return self.gatherv(given...); }, tensor("tensor"),
      value<int>("root"), value_or_0<int>("dim"));
  def<Kind::collective>(
      group, "all_to_all",
      "Splits the tensor of each rank along dimension 0 into size equal slices. Returns the slices of this rank, in "
      "rank order.",
      [](ProcessGroup& self, const auto&... given) { return self.all_to_all(given...); }, tensor("tensor"));
  def<Kind::collective>(
      group, "all_to_allv",
      "Sends rows[r] rows of dimension 0 to each rank r. Returns the received rows of all ranks, in rank order, and "
      "the number of rows of each rank.",
      [](ProcessGroup& self, const Tensor& own, const Sizes& rows, const auto& options) {
        Sizes received;
        Tensor result = self.all_to_allv(own, rows, &received, options);
        return std::pair(std::move(result), std::move(received));
      },
      tensor("tensor"), value<Sizes>("rows"));
  group.def(
      "broadcast_config",
      [](ProcessGroup& self, nb::handle given, nb::handle root, nb::handle timeout) -> Any {
        const auto [own, root_rank, options] = made_in(self, [&] {
          const int rank = argument_of<int>(root, "root");
          return std::tuple{self.rank() == rank ? config_of(given) : Config(), rank, collective_options_of(timeout)};
        });
        return object_of(without_gil([&] { return self.broadcast_config(own, root_rank, options); }));
      },
      named("config"), named("root"), nb::kw_only(), named("timeout") = nb::none(),
      nb::sig(
          "def broadcast_config(self, config: typing.Any, root: int, *, timeout: float | None = None) -> typing.Any"),
      "Returns the config of `root` on all ranks. `config` is ignored on the other ranks.");
  def<Kind::collective>(
      group, "all_gather_config", "Returns a list of the configs of all ranks, on all ranks.",
      [](ProcessGroup& self, const auto&... given) { return self.all_gather_config(given...); }, config());
  def<Kind::collective>(
      group, "gather_config",
      "Returns a list of the configs of all ranks on `root`, and an empty list on the other ranks.",
      [](ProcessGroup& self, const auto&... given) { return self.gather_config(given...); }, config(),
      value<int>("root"));
}

void bind_messages(nb::class_<Closable<ProcessGroup>>& group) {
  def<Kind::message>(
      group, "send",
      R"(Sends a tensor to one rank, which receives it by recv(). Messages with the same tag arrive in order.

The receiver buffers about 256 KiB of messages per sender. Beyond that, the call waits until the message is received.
`to`: the rank that receives. `tag`: 0 or more.)",
      [](ProcessGroup& self, const auto&... given) { self.send(given...); }, tensor("tensor"), value<int>("to"),
      value_or_0<int>("tag"));
  def<Kind::message>(
      group, "recv",
      R"(Receives a tensor into `out`, and returns the sender.

`source`: the rank that sends. None: any rank. `tag`: the tag of the message. None: any tag. Raises RankMismatchError
if `out` does not have the dtype and shape of the message.)",
      [](ProcessGroup& self, const auto&... given) { return self.recv(given...); }, tensor("out"), sender(),
      received_tag());
  def<Kind::message>(
      group, "send_config", "Sends a config to one rank, which receives it by recv_config(). Otherwise as send().",
      [](ProcessGroup& self, const auto&... given) { self.send_config(given...); }, config(), value<int>("to"),
      value_or_0<int>("tag"));
  def<Kind::message>(
      group, "recv_config",
      "Receives a config, and returns (config, sender, tag). `source` and `tag` are as for recv().",
      [](ProcessGroup& self, const auto&... given) { return self.recv_message(given...); }, sender(), received_tag());
  def<Kind::begun>(
      group, "isend",
      "Starts to send a tensor as send() does, and returns without waiting. The tensor must not change until the work "
      "is done.",
      [](ProcessGroup& self, const auto&... given) { return self.isend(given...); }, tensor("tensor"), value<int>("to"),
      value_or_0<int>("tag"));
  def<Kind::begun>(
      group, "irecv",
      "Starts to receive a tensor as recv() does, and returns without waiting. Do not use `out` until the work is "
      "done. get() of the work returns the sender.",
      [](ProcessGroup& self, const auto&... given) { return self.irecv(given...); }, tensor("out"), sender(),
      received_tag());
  def<Kind::begun>(
      group, "isend_config", "Starts to send a config as send_config() does, and returns without waiting.",
      [](ProcessGroup& self, const auto&... given) { return self.isend_config(given...); }, config(), value<int>("to"),
      value_or_0<int>("tag"));
  def<Kind::begun>(
      group, "irecv_config",
      "Starts to receive a config as recv_config() does, and returns without waiting. get() of the work returns "
      "(config, sender, tag).",
      [](ProcessGroup& self, const auto&... given) { return self.irecv_config(given...); }, sender(), received_tag());
  group.def(
      "probe",
      [](ProcessGroup& self, nb::handle source, nb::handle tag) -> nb::object {
        const auto found = self.probe(sender().make(source), received_tag().make(tag));
        return found ? nb::object(nb::make_tuple(found->from, found->tag, found->bytes)) : nb::none();
      },
      named("source"), named("tag") = nb::none(),
      nb::sig("def probe(self, source: int | None, tag: int | None = None) -> tuple[int, int, int] | None"),
      "Returns (sender, tag, bytes of its tensors) of the oldest message that has arrived, or None without a message. "
      "It does not wait. `source` and `tag` are as for recv().");
}

}  // namespace

void bind_collectives(nb::module_& module) {
  bind_work<void>(module, "SendWork", "def get(self) -> None");
  bind_work<int>(module, "ReceiveWork", "def get(self) -> int");
  bind_work<ReceivedConfig>(module, "ReceiveConfigWork", "def get(self) -> tuple[typing.Any, int, int]");
  nb::class_<Closable<ProcessGroup>> group(module, "ProcessGroup",
                                           R"(Collectives and messages of the ranks of a group.

Creating it is collective over `group`. Its rounds, messages and failures are separate from those of `group`.
Collective calls: each rank makes the same calls in the same order, from one thread at a time. Ranks are numbers in
this group.

Tensors are any objects that muster.as_tensor() accepts. Tensors that receive results must be contiguous and writable.
All ranks pass the same dtype and shape, unless a call states otherwise. The caller may reuse the tensors when the
call returns. Results remain valid as long as they are held.

These arguments mean the same in all calls. `tensor`: the tensor of this rank. `out`: receives the result. `op`:
a muster.ReduceOp or its value: 'sum', 'product', 'min', 'max' or 'average'. `root`: the rank that sends to all ranks or receives from them. `dim`: a
dimension. `config`: a dict, a list or a value, with tensors as any leaves. `timeout`: the longest wait without
progress of the awaited ranks, in seconds. None: the default of the group.

Args:
    group: A muster.Group, a process group of torch.distributed, or None for the world.
    timeout: The default of the group in seconds. None: that of `group`.

Raises:
    InvalidArgumentError: An argument is invalid. In a collective call all ranks raise it, nothing is written, and the
        group remains usable. An invalid argument of a message raises it on its rank only.
    UnsupportedError: A rank cannot execute the call. All ranks raise it, and the group remains usable.
    RankMismatchError: The ranks disagree. All ranks raise it, and the group remains usable.
    TimeoutError: Ranks made no progress. The group is aborted: each later call raises the same error.
    PeerLostError: A rank died or left. The group is aborted.
    CancelledError: A wait was interrupted, or the group was aborted. The group is aborted.)");
  group
      .def(
          "__init__",
          [](Closable<ProcessGroup>* self, nb::handle of, nb::handle timeout) {
            const auto made = group_of(of);
            const CollectiveOptions options = made_for(*made, [&] { return collective_options_of(timeout); });
            new (self)
                Closable<ProcessGroup>(without_gil([&] { return std::make_shared<ProcessGroup>(*made, options); }));
          },
          named("group") = nb::none(), nb::kw_only(), named("timeout") = nb::none(),
          nb::sig("def __init__(self, group: typing.Any = None, *, timeout: float | None = None) -> None"),
          "Creates the process group. Collective over `group`.")
      .def_prop_ro(
          "rank", [](const ProcessGroup& self) { return self.rank(); },
          "The rank of this process in the group, from 0 to size - 1.")
      .def_prop_ro(
          "size", [](const ProcessGroup& self) { return self.size(); }, "The number of ranks.")
      .def_prop_ro(
          "backend", [](const ProcessGroup& self) { return std::string(self.backend()); },
          "How elements are transferred: 'shared memory', 'messages', or 'shared memory, and messages between hosts'.")
      .def(
          "global_rank", [](const ProcessGroup& self, int rank) { return self.global_rank(rank); }, nb::arg("rank"),
          "Returns the global rank of a rank of this group. Local.")
      .def(
          "group_rank", [](const ProcessGroup& self, int global_rank) { return self.group_rank(global_rank); },
          nb::arg("global_rank"),
          "Returns the rank in this group of a global rank, or None if it is not in this group. Local.")
      .def(
          "abort",
          [](ProcessGroup& self, const std::string& reason) {
            self.group().abort(group::in_own_name(self.group(), Error(ErrorKind::cancelled, reason)));
          },
          nb::arg("reason"),
          "Aborts the group: waits on any rank, and all later calls, raise CancelledError. Local, on any thread. "
          "`reason`: the text of the message.");
  group.def(
      "split",
      [](ProcessGroup& self, nb::handle ranks, nb::handle timeout) {
        const auto [list, options] = made_for(self.group(), [&] {
          return std::pair{argument_of<std::vector<int>>(ranks, "ranks"), collective_options_of(timeout)};
        });
        auto part = without_gil([&] { return self.split(list, options); });
        return part ? std::optional(Closable<ProcessGroup>(std::move(part))) : std::nullopt;
      },
      named("ranks"), nb::kw_only(), named("timeout") = nb::none(),
      nb::sig(
          "def split(self, ranks: collections.abc.Iterable[int], *, timeout: float | None = None) -> ProcessGroup | "
          "None"),
      "Returns a process group of the ranks of a list, in the order of the list, or None on a rank that is in no list. "
      "Collective.");
  def<Kind::collective>(group, "barrier", "Waits until all ranks have entered the barrier.",
                        [](ProcessGroup& self, const auto&... given) { self.barrier(given...); });
  bind_collectives_in_place(group);
  bind_collectives_with_results(group);
  bind_messages(group);
  def_closing<ProcessGroup>(group,
                            R"(Leaves the group and releases its memory. Local; a second call does nothing.

Later calls raise InvalidArgumentError here, and ranks that wait for this one raise PeerLostError. Close a group after
its last call on all ranks, such as after a barrier(). Messages that have not been transferred are discarded. Results
remain valid. `with` closes the group at the end of its block.)",
                            "def __enter__(self) -> ProcessGroup");
}

}  // namespace muster::python
