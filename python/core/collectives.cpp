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
#include "python/core/waiting.hpp"
#include "src/collectives/engine.hpp"
#include "src/sync/failing.hpp"

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

/// One tensor for all ranks, or a list of one for each.
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
  throw Error(ErrorKind::argument, fmt::format("op is 'sum', 'product', 'min', 'max' or 'average', not '{}'", name));
}

CollectiveOptions options_of(nb::handle timeout) {
  return {.timeout = timeout_of(argument_of<Seconds>(timeout, "timeout"))};
}

/// The arguments of a collective call of a process group; all ranks raise an error of one.
template <class Make>
auto made_in(ProcessGroup& group, const Make& make) -> decltype(make()) {
  return made_or_refused(make, [&](const Error& failure) { collectives::engine_of(group).refuse(failure); });
}

/// As Python has a result.
template <class Result>
Result python_of(Result result) {
  return result;
}
nb::list python_of(const std::vector<Config>& configs) {
  nb::list list;
  for (const Config& config : configs) list.append(object_of(config));
  return list;
}
nb::tuple python_of(const ReceivedConfig& received) {
  return nb::make_tuple(object_of(received.config), received.from, received.tag);
}

/// A parameter: how Python knows it, and make(object), the argument that the library takes. `Value`: what Python is
/// told that it is.
template <class Value, class Name, class Make>
struct Parameter {
  Name name;
  Make make;
  using Object = Given<Value>;
};
template <class Value, class Name, class Make>
Parameter<Value, Name, Make> parameter(Name name, Make make) {
  return {std::move(name), std::move(make)};
}

template <class Value>
auto value(const char* name) {
  return parameter<Value>(nb::arg(name), [name](nb::handle given) { return argument_of<Value>(given, name); });
}
template <class Value>
auto value(const char* name, int preset) {
  return parameter<Value>(nb::arg(name) = preset, [name](nb::handle given) { return argument_of<Value>(given, name); });
}
auto tensor(const char* name) {
  return parameter<TensorLike>(nb::arg(name), tensor_of);
}
auto config() {
  return parameter<nb::object>(nb::arg("config").none(), config_of);
}
auto reduction() {
  return parameter<std::string>(nb::arg("op") = "sum", op_of);
}
auto all_sizes() {
  using Value = std::optional<Sizes>;
  return parameter<Value>(nb::arg("sizes") = nb::none(),
                          [](nb::handle given) { return argument_of<Value>(given, "sizes"); });
}
auto sender() {
  return parameter<Number>(nb::arg("source").none(),
                           [](nb::handle given) { return argument_of<Number>(given, "source").value_or(any_rank); });
}
auto received_tag() {
  return parameter<Number>(nb::arg("tag").none() = 0,
                           [](nb::handle given) { return argument_of<Number>(given, "tag").value_or(any_tag); });
}

auto tensors(const char* name) {
  return parameter<std::optional<std::vector<TensorLike>>>(nb::arg(name).none(), tensors_of);
}
auto tensor_or_list(const char* name) {
  return parameter<TensorOrListLike>(nb::arg(name).none(), tensor_or_list_of);
}

enum class Kind : std::uint8_t {
  collective,  ///< all ranks make the call, and raise an error of one rank's arguments
  message,     ///< between two ranks: what is wrong with its arguments is this rank's alone
  begun,       ///< a message that nobody waits for: call() gives its Work, which keeps the group
};

/// A call of a process group: call(self, arguments..., options), without the interpreter where it may wait.
template <Kind kind, class Call, class... Parameters>
void def(nb::class_<ProcessGroup>& group, const char* name, const char* words, Call call, Parameters... parameters) {
  const auto bound = [call, ... make = parameters.make](ProcessGroup& self, const typename Parameters::Object&... given,
                                                        const Given<Seconds>& timeout) {
    // Braces: in the order of the parameters.
    const auto make_all = [&] { return std::tuple{make(given)..., options_of(timeout)}; };
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
  if constexpr (kind == Kind::begun)
    group.def(name, bound, nb::keep_alive<0, 1>(), parameters.name..., nb::kw_only(), nb::arg("timeout") = nb::none(),
              words);
  else
    group.def(name, bound, parameters.name..., nb::kw_only(), nb::arg("timeout") = nb::none(), words);
}

template <class Result>
void bind_work(nb::module_& module, const char* name) {
  nb::class_<Work<Result>>(module, name, "An operation under way.")
      .def(
          "is_done", [](const Work<Result>& self) { return self.is_done(); }, "Whether it has ended. Never waits.")
      .def(
          "wait",
          [](const Work<Result>& self, double seconds) {
            const auto longest = *timeout_of(seconds);
            return without_gil([&] { return self.wait_for(longest); });
          },
          nb::arg("timeout"), "Waits until it has ended, at most so long; false if it has not.")
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
          "Waits until it has ended, and gives its result or raises its error. Once.");
}

void bind_collectives_in_place(nb::class_<ProcessGroup>& group) {
  def<Kind::collective>(
      group, "all_reduce",
      "In place: each element becomes that of all ranks by `op` (sum, product, min, max, average), the same bits on "
      "all.",
      [](ProcessGroup& self, const auto&... given) { self.all_reduce(given...); }, tensor("tensor"), reduction());
  def<Kind::collective>(
      group, "all_reduce_into", "all_reduce() of `tensor` into `out`, of its dtype and shape.",
      [](ProcessGroup& self, const auto&... given) { self.all_reduce_into(given...); }, tensor("out"), tensor("tensor"),
      reduction());
  def<Kind::collective>(
      group, "reduce", "The result is in root's tensor; the others' stay as they are.",
      [](ProcessGroup& self, const auto&... given) { self.reduce(given...); }, tensor("tensor"), value<int>("root"),
      reduction());
  def<Kind::collective>(
      group, "broadcast", "Root's elements come into all tensors.",
      [](ProcessGroup& self, const auto&... given) { self.broadcast(given...); }, tensor("tensor"), value<int>("root"));
  def<Kind::collective>(
      group, "reduce_scatter_into",
      "This rank's of size equal slices of the reduced tensor, along dimension 0, into `out`.",
      [](ProcessGroup& self, const auto&... given) { self.reduce_scatter_into(given...); }, tensor("out"),
      tensor("tensor"), reduction());
  def<Kind::collective>(
      group, "all_gather_into",
      "`out`: one tensor, size times as long along dimension 0, or a list of one for each rank, whose extents of "
      "dimension 0 may differ.",
      [](ProcessGroup& self, const TensorOrList& out, const auto&... given) {
        std::visit([&](const auto& to) { self.all_gather_into(to, given...); }, out);
      },
      tensor_or_list("out"), tensor("tensor"));
  def<Kind::collective>(
      group, "gather_into",
      "`out` on root: a list of one tensor for each rank; None on the others. Or one tensor on all ranks.",
      [](ProcessGroup& self, const TensorOrList& out, const auto&... given) {
        std::visit([&](const auto& to) { self.gather_into(to, given...); }, out);
      },
      tensor_or_list("out"), tensor("tensor"), value<int>("root"));
  def<Kind::collective>(
      group, "scatter", "`parts`: on root one tensor for each rank; None on the others.",
      [](ProcessGroup& self, const Tensor& out, const std::vector<Tensor>& parts, const auto&... given) {
        self.scatter(out, std::vector<TensorView>(parts.begin(), parts.end()), given...);
      },
      tensor("out"), tensors("parts"), value<int>("root"));
  def<Kind::collective>(
      group, "all_to_all_into", "all_to_all() into `out`, of the tensor's dtype and shape, and not its memory.",
      [](ProcessGroup& self, const auto&... given) { self.all_to_all_into(given...); }, tensor("out"),
      tensor("tensor"));
}

void bind_collectives_with_results(nb::class_<ProcessGroup>& group) {
  def<Kind::collective>(
      group, "all_reduce_shared", "One result for all ranks of a host, which each has mapped, read-only.",
      [](ProcessGroup& self, const auto&... given) { return self.all_reduce_shared(given...); }, tensor("tensor"),
      reduction());
  def<Kind::collective>(
      group, "all_gather_shared", "Likewise, along dimension 0.",
      [](ProcessGroup& self, const auto&... given) { return self.all_gather_shared(given...); }, tensor("tensor"));
  def<Kind::collective>(
      group, "reduce_scatter", "This rank's slice. `sizes`: the extents of all; None: equal ones.",
      [](ProcessGroup& self, const Tensor& own, int dim, ReduceOp op, const std::optional<Sizes>& sizes,
         const auto& options) {
        return sizes ? self.reduce_scatterv(own, *sizes, dim, op, options) : self.reduce_scatter(own, dim, op, options);
      },
      tensor("tensor"), value<int>("dim", 0), reduction(), all_sizes());
  def<Kind::collective>(
      group, "all_gather",
      "All ranks' tensors, of one dtype and shape, joined along `dim` in their order; on all ranks.",
      [](ProcessGroup& self, const auto&... given) { return self.all_gather(given...); }, tensor("tensor"),
      value<int>("dim", 0));
  def<Kind::collective>(
      group, "all_gatherv",
      "As all_gather(); the extents along `dim` may differ. `sizes`: those of all ranks, if they are known.",
      [](ProcessGroup& self, const Tensor& own, int dim, const std::optional<Sizes>& sizes, const auto& options) {
        return self.all_gatherv(own, dim, sizes.value_or(Sizes{}), options);
      },
      tensor("tensor"), value<int>("dim", 0), all_sizes());
  def<Kind::collective>(
      group, "gather", "On root all tensors along `dim`; None elsewhere.",
      [](ProcessGroup& self, const auto&... given) { return self.gather(given...); }, tensor("tensor"),
      value<int>("root"), value<int>("dim", 0));
  def<Kind::collective>(
      group, "gatherv", "As gather(); the extents along `dim` may differ.",
      [](ProcessGroup& self, const auto&... given) { return self.gatherv(given...); }, tensor("tensor"),
      value<int>("root"), value<int>("dim", 0));
  def<Kind::collective>(
      group, "all_to_all",
      "Cut along dimension 0 into size equal slices: the result has this rank's slice of each rank's tensor, in their "
      "order.",
      [](ProcessGroup& self, const auto&... given) { return self.all_to_all(given...); }, tensor("tensor"));
  def<Kind::collective>(
      group, "all_to_allv",
      "`rows`: how many rows of dimension 0 go to each rank. Returns (the rows that came from all, in their order; how "
      "many from each).",
      [](ProcessGroup& self, const Tensor& own, const Sizes& rows, const auto& options) {
        Sizes received;
        Tensor result = self.all_to_allv(own, rows, &received, options);
        return std::pair(std::move(result), std::move(received));
      },
      tensor("tensor"), value<Sizes>("rows"));
  group.def(
      "broadcast_config",
      [](ProcessGroup& self, nb::handle given, const Given<int>& root, const Given<Seconds>& timeout) {
        const auto [own, root_rank, options] = made_in(self, [&] {
          const int rank = argument_of<int>(root, "root");
          return std::tuple{self.rank() == rank ? config_of(given) : Config(), rank, options_of(timeout)};
        });
        return object_of(without_gil([&] { return self.broadcast_config(own, root_rank, options); }));
      },
      nb::arg("config").none(), nb::arg("root"), nb::kw_only(), nb::arg("timeout") = nb::none(),
      "Root's, on all ranks; what the others give is not looked at.");
  def<Kind::collective>(
      group, "all_gather_config", "A list of each rank's config, on all ranks.",
      [](ProcessGroup& self, const auto&... given) { return self.all_gather_config(given...); }, config());
  def<Kind::collective>(
      group, "gather_config", "On root a list of each rank's; empty elsewhere.",
      [](ProcessGroup& self, const auto&... given) { return self.gather_config(given...); }, config(),
      value<int>("root"));
}

void bind_messages(nb::class_<ProcessGroup>& group) {
  def<Kind::message>(
      group, "send",
      "To one rank, which receives it by recv(): messages of one tag come in order. `tag`: 0 or more. May wait for the "
      "receiver beyond 64 KiB.",
      [](ProcessGroup& self, const auto&... given) { self.send(given...); }, tensor("tensor"), value<int>("to"),
      value<int>("tag", 0));
  def<Kind::message>(
      group, "recv",
      "Into `out`, of the sent dtype and shape, else RankMismatchError; returns the sender. None: any rank, any tag.",
      [](ProcessGroup& self, const auto&... given) { return self.recv(given...); }, tensor("out"), sender(),
      received_tag());
  def<Kind::message>(
      group, "send_config", "To one rank, which receives it by recv_config(); as send().",
      [](ProcessGroup& self, const auto&... given) { self.send_config(given...); }, config(), value<int>("to"),
      value<int>("tag", 0));
  def<Kind::message>(
      group, "recv_config", "(config, sender, tag). None: any rank, any tag.",
      [](ProcessGroup& self, const auto&... given) { return self.recv_message(given...); }, sender(), received_tag());
  def<Kind::begun>(
      group, "isend", "As send() without waiting: the tensor has to stay as it is until the work is done.",
      [](ProcessGroup& self, const auto&... given) { return self.isend(given...); }, tensor("tensor"), value<int>("to"),
      value<int>("tag", 0));
  def<Kind::begun>(
      group, "irecv", "As recv() without waiting: `out` is the work's until it is done; its get() is the sender.",
      [](ProcessGroup& self, const auto&... given) { return self.irecv(given...); }, tensor("out"), sender(),
      received_tag());
  def<Kind::begun>(
      group, "isend_config", "As send_config() without waiting.",
      [](ProcessGroup& self, const auto&... given) { return self.isend_config(given...); }, config(), value<int>("to"),
      value<int>("tag", 0));
  def<Kind::begun>(
      group, "irecv_config", "As recv_config() without waiting: the work's get() is (config, sender, tag).",
      [](ProcessGroup& self, const auto&... given) { return self.irecv_config(given...); }, sender(), received_tag());
  group.def(
      "probe",
      [](ProcessGroup& self, const Given<Number>& source, const Given<Number>& tag) -> nb::object {
        const auto found = self.probe(sender().make(source), received_tag().make(tag));
        return found ? nb::object(nb::make_tuple(found->from, found->tag, found->bytes)) : nb::none();
      },
      nb::arg("source").none(), nb::arg("tag").none() = nb::none(),
      "(sender, tag, bytes of its tensors) of the oldest message that has come; None if there is none. Never waits.");
}

}  // namespace

void bind_collectives(nb::module_& module) {
  bind_work<void>(module, "SendWork");
  bind_work<int>(module, "ReceiveWork");
  bind_work<ReceivedConfig>(module, "ReceiveConfigWork");
  nb::class_<ProcessGroup> group(
      module, "ProcessGroup",
      "Collectives and messages of the ranks of a group, with rounds, messages and failures of its own, beside "
      "those of the group that it was made of. Collective: each rank makes the same calls in the same order, from "
      "one thread at a time. Ranks are those of this group.\n\n"
      "Tensors are whatever muster.as_tensor() takes; results in place and `out` have to be contiguous and "
      "writable. Ranks agree about dtype and shape, but where a call says otherwise. What is read or written is the "
      "caller's again when the call returns; results stay as long as they are held. `timeout`: seconds without "
      "progress of the ranks waited for; None: the group's.\n\n"
      "Raises ArgumentError, UnsupportedError or RankMismatchError on all ranks if one cannot do it or they "
      "disagree: nothing is written, and the group remains usable. TimeoutError, PeerLostError and CancelledError end "
      "the group: each later call raises the same error. A wrong argument of a message is ArgumentError on its rank "
      "only.");
  group
      .def(
          "__init__",
          [](ProcessGroup* self, nb::handle of, const Given<Seconds>& timeout) {
            const auto made = group_of(of);
            const CollectiveOptions options = made_for(*made, [&] { return options_of(timeout); });
            new (self) ProcessGroup(without_gil([&] { return ProcessGroup(*made, options); }));
          },
          nb::arg("group").none() = nb::none(), nb::kw_only(), nb::arg("timeout") = nb::none(),
          "Collective over `group`; None: the world.")
      .def_prop_ro("rank", &ProcessGroup::rank)
      .def_prop_ro("size", &ProcessGroup::size)
      .def_prop_ro("backend", [](const ProcessGroup& self) { return std::string(self.backend()); })
      .def("global_rank", &ProcessGroup::global_rank, nb::arg("rank"), "What the job calls a rank of this group.")
      .def("rank_of_global", &ProcessGroup::rank_of_global, nb::arg("global_rank"),
           "The rank here of a rank of the job; None if it is not in this group.")
      .def(
          "abort",
          [](ProcessGroup& self, const std::string& reason) {
            self.group().poison(sync::in_own_name(self.group(), Error(ErrorKind::cancelled, reason)));
          },
          nb::arg("reason"),
          "Local, any thread. Ends the group: what waits on any rank, and each later call, raises CancelledError.");
  group.def(
      "split",
      [](ProcessGroup& self, const Given<std::vector<int>>& ranks, const Given<Seconds>& timeout) {
        const auto [list, options] = made_for(self.group(), [&] {
          return std::pair{argument_of<std::vector<int>>(ranks, "ranks"), options_of(timeout)};
        });
        auto part = without_gil([&] { return self.split(list, options); });
        return part ? std::optional(std::move(*part)) : std::nullopt;
      },
      nb::arg("ranks"), nb::kw_only(), nb::arg("timeout") = nb::none(),
      "Collective. Returns the group of the ranks of a list, in its order; None on a rank that is in no list.");
  def<Kind::collective>(group, "barrier", "Returns when all ranks have come.",
                        [](ProcessGroup& self, const auto&... given) { self.barrier(given...); });
  bind_collectives_in_place(group);
  bind_collectives_with_results(group);
  bind_messages(group);
}

}  // namespace muster::python
