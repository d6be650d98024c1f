// SPDX-License-Identifier: Apache-2.0
// muster.ProcessGroup: collectives and messages.

#include <fmt/core.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "muster/process_group.hpp"
#include "python/core/arguments.hpp"
#include "python/core/bindings.hpp"
#include "python/core/waiting.hpp"
#include "src/sync/failing.hpp"

namespace muster::python {
namespace {

using Seconds = std::optional<double>;
using Sizes = std::vector<std::int64_t>;
using Number = std::optional<int>;

Tensor tensor_for(ProcessGroup& group, nb::handle object) {
  return made_for(group.group(), [&] { return tensor_of(object); });
}

std::vector<Tensor> tensors_for(ProcessGroup& group, nb::handle objects) {
  return made_for(group.group(), [&] {
    std::vector<Tensor> tensors;
    if (!objects.is_none())
      for (const nb::handle each : nb::iter(objects)) tensors.push_back(tensor_of(each));
    return tensors;
  });
}

Config config_for(ProcessGroup& group, nb::handle object) {
  return made_for(group.group(), [&] { return config_of(object); });
}

bool is_list(nb::handle object) {
  return PyList_Check(object.ptr()) != 0 || PyTuple_Check(object.ptr()) != 0;
}

ReduceOp op_for(ProcessGroup& group, const Given<std::string>& op) {
  return made_for(group.group(), [&] {
    const auto name = argument_of<std::string>(op, "op");
    if (name == "sum") return ReduceOp::sum;
    if (name == "product") return ReduceOp::product;
    if (name == "min") return ReduceOp::min;
    if (name == "max") return ReduceOp::max;
    if (name == "average") return ReduceOp::average;
    throw Error(ErrorKind::argument, fmt::format("op is 'sum', 'product', 'min', 'max' or 'average', not '{}'", name));
  });
}

/// Of a call that nobody waits for but by its messages.
CollectiveOptions options_of(const Given<Seconds>& timeout) {
  return {.timeout = timeout_of(argument_of<Seconds>(timeout, "timeout"))};
}

int sender_of(const Given<Number>& from) {
  return argument_of<Number>(from, "source").value_or(any_rank);
}
int tag_of(const Given<Number>& tag) {
  return argument_of<Number>(tag, "tag").value_or(any_tag);
}

CollectiveOptions options_for(SyncGroup& group, const Given<Seconds>& timeout) {
  return made_for(group, [&] { return options_of(timeout); });
}

nb::object object_of(std::optional<Tensor> tensor) {
  return tensor ? nb::cast(std::move(*tensor)) : nb::none();
}

nb::list list_of(const std::vector<Config>& configs) {
  nb::list list;
  for (const Config& config : configs) list.append(python::object_of(config));
  return list;
}

nb::tuple tuple_of(const ReceivedConfig& received) {
  return nb::make_tuple(python::object_of(received.config), received.from, received.tag);
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
            } else if constexpr (std::is_same_v<Result, ReceivedConfig>) {
              return tuple_of(without_gil([&] { return self.get(); }));
            } else {
              return nb::cast(without_gil([&] { return self.get(); }));
            }
          },
          "Waits until it has ended, and gives its result or raises its error. Once.");
}

void bind_collectives_in_place(nb::class_<ProcessGroup>& group) {
  group
      .def(
          "all_reduce",
          [](ProcessGroup& self, const GivenTensor& tensor, const Given<std::string>& op,
             const Given<Seconds>& timeout) {
            const Tensor own = tensor_for(self, tensor);
            const ReduceOp how = op_for(self, op);
            const CollectiveOptions options = options_for(self.group(), timeout);
            without_gil([&] { self.all_reduce(own, how, options); });
          },
          nb::arg("tensor"), nb::arg("op") = "sum", nb::kw_only(), nb::arg("timeout") = nb::none(),
          "In place: each element becomes that of all ranks by `op` (sum, product, min, max, average), the same bits "
          "on all.")
      .def(
          "all_reduce_into",
          [](ProcessGroup& self, const GivenTensor& out, const GivenTensor& tensor, const Given<std::string>& op,
             const Given<Seconds>& timeout) {
            const Tensor target = tensor_for(self, out);
            const Tensor own = tensor_for(self, tensor);
            const ReduceOp how = op_for(self, op);
            const CollectiveOptions options = options_for(self.group(), timeout);
            without_gil([&] { self.all_reduce_into(target, own, how, options); });
          },
          nb::arg("out"), nb::arg("tensor"), nb::arg("op") = "sum", nb::kw_only(), nb::arg("timeout") = nb::none(),
          "all_reduce() of `tensor` into `out`, of its dtype and shape.")
      .def(
          "reduce",
          [](ProcessGroup& self, const GivenTensor& tensor, const Given<int>& root, const Given<std::string>& op,
             const Given<Seconds>& timeout) {
            const Tensor own = tensor_for(self, tensor);
            const ReduceOp how = op_for(self, op);
            const int root_rank = value_for(self.group(), root, "root");
            const CollectiveOptions options = options_for(self.group(), timeout);
            without_gil([&] { self.reduce(own, root_rank, how, options); });
          },
          nb::arg("tensor"), nb::arg("root"), nb::arg("op") = "sum", nb::kw_only(), nb::arg("timeout") = nb::none(),
          "The result is in root's tensor; the others' stay as they are.")
      .def(
          "broadcast",
          [](ProcessGroup& self, const GivenTensor& tensor, const Given<int>& root, const Given<Seconds>& timeout) {
            const Tensor own = tensor_for(self, tensor);
            const int root_rank = value_for(self.group(), root, "root");
            const CollectiveOptions options = options_for(self.group(), timeout);
            without_gil([&] { self.broadcast(own, root_rank, options); });
          },
          nb::arg("tensor"), nb::arg("root"), nb::kw_only(), nb::arg("timeout") = nb::none(),
          "Root's elements come into all tensors.")
      .def(
          "reduce_scatter_into",
          [](ProcessGroup& self, const GivenTensor& out, const GivenTensor& tensor, const Given<std::string>& op,
             const Given<Seconds>& timeout) {
            const Tensor target = tensor_for(self, out);
            const Tensor own = tensor_for(self, tensor);
            const ReduceOp how = op_for(self, op);
            const CollectiveOptions options = options_for(self.group(), timeout);
            without_gil([&] { self.reduce_scatter_into(target, own, how, options); });
          },
          nb::arg("out"), nb::arg("tensor"), nb::arg("op") = "sum", nb::kw_only(), nb::arg("timeout") = nb::none(),
          "This rank's of size equal slices of the reduced tensor, along dimension 0, into `out`.")
      .def(
          "all_gather_into",
          [](ProcessGroup& self, const GivenTensor& out, const GivenTensor& tensor, const Given<Seconds>& timeout) {
            const Tensor own = tensor_for(self, tensor);
            const CollectiveOptions options = options_for(self.group(), timeout);
            if (is_list(out)) {
              const std::vector<Tensor> targets = tensors_for(self, out);
              without_gil([&] { self.all_gather_into(targets, own, options); });
            } else {
              const Tensor target = tensor_for(self, out);
              without_gil([&] { self.all_gather_into(target, own, options); });
            }
          },
          nb::arg("out"), nb::arg("tensor"), nb::kw_only(), nb::arg("timeout") = nb::none(),
          "`out`: one tensor, size times as long along dimension 0, or a list of one for each rank, whose extents of "
          "dimension 0 may differ.")
      .def(
          "gather_into",
          [](ProcessGroup& self, const GivenTensor& out, const GivenTensor& tensor, const Given<int>& root,
             const Given<Seconds>& timeout) {
            const Tensor own = tensor_for(self, tensor);
            const int root_rank = value_for(self.group(), root, "root");
            const CollectiveOptions options = options_for(self.group(), timeout);
            if (out.object.is_none() || is_list(out)) {
              const std::vector<Tensor> targets = tensors_for(self, out);
              without_gil([&] { self.gather_into(targets, own, root_rank, options); });
            } else {
              const Tensor target = tensor_for(self, out);
              without_gil([&] { self.gather_into(target, own, root_rank, options); });
            }
          },
          nb::arg("out").none(), nb::arg("tensor"), nb::arg("root"), nb::kw_only(), nb::arg("timeout") = nb::none(),
          "`out` on root: a list of one tensor for each rank; None on the others. Or one tensor on all ranks.")
      .def(
          "scatter",
          [](ProcessGroup& self, const GivenTensor& out, const GivenTensor& parts, const Given<int>& root,
             const Given<Seconds>& timeout) {
            const Tensor target = tensor_for(self, out);
            const std::vector<Tensor> tensors = tensors_for(self, parts);
            const std::vector<TensorView> views(tensors.begin(), tensors.end());
            const int root_rank = value_for(self.group(), root, "root");
            const CollectiveOptions options = options_for(self.group(), timeout);
            without_gil([&] { self.scatter(target, views, root_rank, options); });
          },
          nb::arg("out"), nb::arg("parts").none(), nb::arg("root"), nb::kw_only(), nb::arg("timeout") = nb::none(),
          "`parts`: on root one tensor for each rank; None on the others.")
      .def(
          "all_to_all_into",
          [](ProcessGroup& self, const GivenTensor& out, const GivenTensor& tensor, const Given<Seconds>& timeout) {
            const Tensor target = tensor_for(self, out);
            const Tensor own = tensor_for(self, tensor);
            const CollectiveOptions options = options_for(self.group(), timeout);
            without_gil([&] { self.all_to_all_into(target, own, options); });
          },
          nb::arg("out"), nb::arg("tensor"), nb::kw_only(), nb::arg("timeout") = nb::none(),
          "all_to_all() into `out`, of the tensor's dtype and shape, and not its memory.");
}

void bind_collectives_with_results(nb::class_<ProcessGroup>& group) {
  group
      .def(
          "all_reduce_shared",
          [](ProcessGroup& self, const GivenTensor& tensor, const Given<std::string>& op,
             const Given<Seconds>& timeout) {
            const Tensor own = tensor_for(self, tensor);
            const ReduceOp how = op_for(self, op);
            const CollectiveOptions options = options_for(self.group(), timeout);
            return without_gil([&] { return self.all_reduce_shared(own, how, options); });
          },
          nb::arg("tensor"), nb::arg("op") = "sum", nb::kw_only(), nb::arg("timeout") = nb::none(),
          "One result for all ranks of a host, which each has mapped, read-only.")
      .def(
          "all_gather_shared",
          [](ProcessGroup& self, const GivenTensor& tensor, const Given<Seconds>& timeout) {
            const Tensor own = tensor_for(self, tensor);
            const CollectiveOptions options = options_for(self.group(), timeout);
            return without_gil([&] { return self.all_gather_shared(own, options); });
          },
          nb::arg("tensor"), nb::kw_only(), nb::arg("timeout") = nb::none(), "Likewise, along dimension 0.")
      .def(
          "reduce_scatter",
          [](ProcessGroup& self, const GivenTensor& tensor, const Given<int>& dim, const Given<std::string>& op,
             const Given<std::optional<Sizes>>& sizes, const Given<Seconds>& timeout) {
            const Tensor own = tensor_for(self, tensor);
            const ReduceOp how = op_for(self, op);
            const int along = value_for(self.group(), dim, "dim");
            const auto extents = value_for(self.group(), sizes, "sizes");
            const CollectiveOptions options = options_for(self.group(), timeout);
            return without_gil([&] {
              return extents ? self.reduce_scatterv(own, *extents, along, how, options)
                             : self.reduce_scatter(own, along, how, options);
            });
          },
          nb::arg("tensor"), nb::arg("dim") = 0, nb::arg("op") = "sum", nb::kw_only(), nb::arg("sizes") = nb::none(),
          nb::arg("timeout") = nb::none(), "This rank's slice. `sizes`: the extents of all; None: equal ones.")
      .def(
          "all_gather",
          [](ProcessGroup& self, const GivenTensor& tensor, const Given<int>& dim, const Given<Seconds>& timeout) {
            const Tensor own = tensor_for(self, tensor);
            const int along = value_for(self.group(), dim, "dim");
            const CollectiveOptions options = options_for(self.group(), timeout);
            return without_gil([&] { return self.all_gather(own, along, options); });
          },
          nb::arg("tensor"), nb::arg("dim") = 0, nb::kw_only(), nb::arg("timeout") = nb::none(),
          "All ranks' tensors, of one dtype and shape, joined along `dim` in their order; on all ranks.")
      .def(
          "all_gatherv",
          [](ProcessGroup& self, const GivenTensor& tensor, const Given<int>& dim,
             const Given<std::optional<Sizes>>& sizes, const Given<Seconds>& timeout) {
            const Tensor own = tensor_for(self, tensor);
            const int along = value_for(self.group(), dim, "dim");
            const auto extents = value_for(self.group(), sizes, "sizes");
            const CollectiveOptions options = options_for(self.group(), timeout);
            return without_gil([&] { return self.all_gatherv(own, along, extents.value_or(Sizes{}), options); });
          },
          nb::arg("tensor"), nb::arg("dim") = 0, nb::kw_only(), nb::arg("sizes") = nb::none(),
          nb::arg("timeout") = nb::none(),
          "As all_gather(); the extents along `dim` may differ. `sizes`: those of all ranks, if they are known.")
      .def(
          "gather",
          [](ProcessGroup& self, const GivenTensor& tensor, const Given<int>& root, const Given<int>& dim,
             const Given<Seconds>& timeout) {
            const Tensor own = tensor_for(self, tensor);
            const int root_rank = value_for(self.group(), root, "root");
            const int along = value_for(self.group(), dim, "dim");
            const CollectiveOptions options = options_for(self.group(), timeout);
            return object_of(without_gil([&] { return self.gather(own, root_rank, along, options); }));
          },
          nb::arg("tensor"), nb::arg("root"), nb::arg("dim") = 0, nb::kw_only(), nb::arg("timeout") = nb::none(),
          "On root all tensors along `dim`; None elsewhere.")
      .def(
          "gatherv",
          [](ProcessGroup& self, const GivenTensor& tensor, const Given<int>& root, const Given<int>& dim,
             const Given<Seconds>& timeout) {
            const Tensor own = tensor_for(self, tensor);
            const int root_rank = value_for(self.group(), root, "root");
            const int along = value_for(self.group(), dim, "dim");
            const CollectiveOptions options = options_for(self.group(), timeout);
            return object_of(without_gil([&] { return self.gatherv(own, root_rank, along, options); }));
          },
          nb::arg("tensor"), nb::arg("root"), nb::arg("dim") = 0, nb::kw_only(), nb::arg("timeout") = nb::none(),
          "As gather(); the extents along `dim` may differ.")
      .def(
          "all_to_all",
          [](ProcessGroup& self, const GivenTensor& tensor, const Given<Seconds>& timeout) {
            const Tensor own = tensor_for(self, tensor);
            const CollectiveOptions options = options_for(self.group(), timeout);
            return without_gil([&] { return self.all_to_all(own, options); });
          },
          nb::arg("tensor"), nb::kw_only(), nb::arg("timeout") = nb::none(),
          "Cut along dimension 0 into size equal slices: the result has this rank's slice of each rank's tensor, in "
          "their order.")
      .def(
          "all_to_allv",
          [](ProcessGroup& self, const GivenTensor& tensor, const Given<Sizes>& rows, const Given<Seconds>& timeout) {
            const Tensor own = tensor_for(self, tensor);
            const Sizes counts = value_for(self.group(), rows, "rows");
            const CollectiveOptions options = options_for(self.group(), timeout);
            Sizes received;
            Tensor result = without_gil([&] { return self.all_to_allv(own, counts, &received, options); });
            return nb::make_tuple(std::move(result), received);
          },
          nb::arg("tensor"), nb::arg("rows"), nb::kw_only(), nb::arg("timeout") = nb::none(),
          "`rows`: how many rows of dimension 0 go to each rank. Returns (the rows that came from all, in their order; "
          "how many from each).")
      .def(
          "broadcast_config",
          [](ProcessGroup& self, nb::handle config, const Given<int>& root, const Given<Seconds>& timeout) {
            const int root_rank = value_for(self.group(), root, "root");
            const CollectiveOptions options = options_for(self.group(), timeout);
            const Config own = self.rank() == root_rank ? config_for(self, config) : Config();
            return python::object_of(without_gil([&] { return self.broadcast_config(own, root_rank, options); }));
          },
          nb::arg("config").none(), nb::arg("root"), nb::kw_only(), nb::arg("timeout") = nb::none(),
          "Root's, on all ranks; what the others give is not looked at.")
      .def(
          "all_gather_config",
          [](ProcessGroup& self, nb::handle config, const Given<Seconds>& timeout) {
            const Config own = config_for(self, config);
            const CollectiveOptions options = options_for(self.group(), timeout);
            return list_of(without_gil([&] { return self.all_gather_config(own, options); }));
          },
          nb::arg("config").none(), nb::kw_only(), nb::arg("timeout") = nb::none(),
          "A list of each rank's config, on all ranks.")
      .def(
          "gather_config",
          [](ProcessGroup& self, nb::handle config, const Given<int>& root, const Given<Seconds>& timeout) {
            const Config own = config_for(self, config);
            const int root_rank = value_for(self.group(), root, "root");
            const CollectiveOptions options = options_for(self.group(), timeout);
            return list_of(without_gil([&] { return self.gather_config(own, root_rank, options); }));
          },
          nb::arg("config").none(), nb::arg("root"), nb::kw_only(), nb::arg("timeout") = nb::none(),
          "On root a list of each rank's; empty elsewhere.");
}

void bind_messages(nb::class_<ProcessGroup>& group) {
  group
      .def(
          "send",
          [](ProcessGroup& self, const GivenTensor& tensor, const Given<int>& to, const Given<int>& tag,
             const Given<Seconds>& timeout) {
            const Tensor own = tensor_of(tensor);
            const int receiver = argument_of<int>(to, "to");
            const int number = argument_of<int>(tag, "tag");
            const CollectiveOptions options = options_of(timeout);
            without_gil([&] { self.send(own, receiver, number, options); });
          },
          nb::arg("tensor"), nb::arg("to"), nb::arg("tag") = 0, nb::kw_only(), nb::arg("timeout") = nb::none(),
          "To one rank, which receives it by recv(): messages of one tag come in order. `tag`: 0 or more. May wait for "
          "the receiver beyond 64 KiB.")
      .def(
          "recv",
          [](ProcessGroup& self, const GivenTensor& out, const Given<Number>& from, const Given<Number>& tag,
             const Given<Seconds>& timeout) {
            const Tensor target = tensor_of(out);
            const int sender = sender_of(from);
            const int number = tag_of(tag);
            const CollectiveOptions options = options_of(timeout);
            return without_gil([&] { return self.recv(target, sender, number, options); });
          },
          nb::arg("out"), nb::arg("source").none(), nb::arg("tag").none() = 0, nb::kw_only(),
          nb::arg("timeout") = nb::none(),
          "Into `out`, of the sent dtype and shape, else RankMismatchError; returns the sender. None: any rank, any "
          "tag.")
      .def(
          "send_config",
          [](ProcessGroup& self, nb::handle config, const Given<int>& to, const Given<int>& tag,
             const Given<Seconds>& timeout) {
            const Config own = config_of(config);
            const int receiver = argument_of<int>(to, "to");
            const int number = argument_of<int>(tag, "tag");
            const CollectiveOptions options = options_of(timeout);
            without_gil([&] { self.send_config(own, receiver, number, options); });
          },
          nb::arg("config").none(), nb::arg("to"), nb::arg("tag") = 0, nb::kw_only(), nb::arg("timeout") = nb::none(),
          "To one rank, which receives it by recv_config(); as send().")
      .def(
          "recv_config",
          [](ProcessGroup& self, const Given<Number>& from, const Given<Number>& tag, const Given<Seconds>& timeout) {
            const int sender = sender_of(from);
            const int number = tag_of(tag);
            const CollectiveOptions options = options_of(timeout);
            return tuple_of(without_gil([&] { return self.recv_message(sender, number, options); }));
          },
          nb::arg("source").none(), nb::arg("tag").none() = 0, nb::kw_only(), nb::arg("timeout") = nb::none(),
          "(config, sender, tag). None: any rank, any tag.")
      .def(
          "probe",
          [](ProcessGroup& self, const Given<Number>& from, const Given<Number>& tag) -> nb::object {
            const auto found = self.probe(sender_of(from), tag_of(tag));
            return found ? nb::object(nb::make_tuple(found->from, found->tag, found->bytes)) : nb::none();
          },
          nb::arg("source").none(), nb::arg("tag").none() = nb::none(),
          "(sender, tag, bytes of its tensors) of the oldest message that has come; None if there is none. Never "
          "waits.")
      .def(
          "isend",
          [](ProcessGroup& self, const GivenTensor& tensor, const Given<int>& to, const Given<int>& tag,
             const Given<Seconds>& timeout) {
            return self.isend(tensor_of(tensor), argument_of<int>(to, "to"), argument_of<int>(tag, "tag"),
                              options_of(timeout));
          },
          nb::keep_alive<0, 1>(), nb::arg("tensor"), nb::arg("to"), nb::arg("tag") = 0, nb::kw_only(),
          nb::arg("timeout") = nb::none(),
          "As send() without waiting: the tensor has to stay as it is until the work is done.")
      .def(
          "irecv",
          [](ProcessGroup& self, const GivenTensor& out, const Given<Number>& from, const Given<Number>& tag,
             const Given<Seconds>& timeout) {
            return self.irecv(tensor_of(out), sender_of(from), tag_of(tag), options_of(timeout));
          },
          nb::keep_alive<0, 1>(), nb::arg("out"), nb::arg("source").none(), nb::arg("tag").none() = 0, nb::kw_only(),
          nb::arg("timeout") = nb::none(),
          "As recv() without waiting: `out` is the work's until it is done; its get() is the sender.")
      .def(
          "isend_config",
          [](ProcessGroup& self, nb::handle config, const Given<int>& to, const Given<int>& tag,
             const Given<Seconds>& timeout) {
            return self.isend_config(config_of(config), argument_of<int>(to, "to"), argument_of<int>(tag, "tag"),
                                     options_of(timeout));
          },
          nb::keep_alive<0, 1>(), nb::arg("config").none(), nb::arg("to"), nb::arg("tag") = 0, nb::kw_only(),
          nb::arg("timeout") = nb::none(), "As send_config() without waiting.")
      .def(
          "irecv_config",
          [](ProcessGroup& self, const Given<Number>& from, const Given<Number>& tag, const Given<Seconds>& timeout) {
            return self.irecv_config(sender_of(from), tag_of(tag), options_of(timeout));
          },
          nb::keep_alive<0, 1>(), nb::arg("source").none(), nb::arg("tag").none() = 0, nb::kw_only(),
          nb::arg("timeout") = nb::none(),
          "As recv_config() without waiting: the work's get() is (config, sender, tag).");
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
      "disagree: nothing is written, and the group goes on. TimeoutError, PeerLostError, CancelledError, and "
      "arguments of another type than a call takes, which the others wait for, end the group: each later call raises "
      "the same. Those of a message are ArgumentError on its rank alone.");
  group
      .def(
          "__init__",
          [](ProcessGroup* self, nb::handle of, const Given<Seconds>& timeout) {
            const auto made = group_of(of);
            const CollectiveOptions options = options_for(*made, timeout);
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
          "split",
          [](ProcessGroup& self, const Given<std::vector<int>>& ranks, const Given<Seconds>& timeout) {
            const std::vector<int> list = value_for(self.group(), ranks, "ranks");
            const CollectiveOptions options = options_for(self.group(), timeout);
            return without_gil([&] { return self.split(list, options); });
          },
          nb::arg("ranks"), nb::kw_only(), nb::arg("timeout") = nb::none(),
          "Collective. The group of the ranks of a list; None on a rank that is not in its list.")
      .def(
          "barrier",
          [](ProcessGroup& self, const Given<Seconds>& timeout) {
            const CollectiveOptions options = options_for(self.group(), timeout);
            without_gil([&] { self.barrier(options); });
          },
          nb::kw_only(), nb::arg("timeout") = nb::none(), "Returns when all ranks have come.")
      .def(
          "abort",
          [](ProcessGroup& self, const std::string& reason) {
            self.group().poison(sync::in_own_name(self.group(), Error(ErrorKind::cancelled, reason)));
          },
          nb::arg("reason"),
          "Local, any thread. Ends the group: what waits on any rank, and each later call, raises CancelledError.");
  bind_collectives_in_place(group);
  bind_collectives_with_results(group);
  bind_messages(group);
}

}  // namespace muster::python
