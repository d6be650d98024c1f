// SPDX-License-Identifier: Apache-2.0
// The parts of the interfaces of other systems that muster.compat takes from the library.

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "muster/compat/group_coordinator.hpp"
#include "muster/compat/master_worker.hpp"
#include "muster/message_queue.hpp"
#include "python/core/arguments.hpp"
#include "python/core/bindings.hpp"
#include "python/core/closable.hpp"
#include "python/core/process_groups.hpp"
#include "python/core/waiting.hpp"
#include "src/compat/dist.hpp"
#include "src/rendezvous/world.hpp"

namespace muster::python {
namespace {

using Seconds = std::optional<double>;
using Lists = std::vector<std::vector<int>>;
using Number = std::optional<int>;
using Wishes = std::map<std::string, bool>;

/// Returns the form in which Python owns an object of the library.
template <class T>
Closable<T> owned(std::shared_ptr<T> object) {
  return Closable<T>(std::move(object));
}

/// Returns a part of the object of Python, which the result keeps alive.
template <class T>
std::shared_ptr<T> part_of(const nb::object& whole, T& part) {
  return {owner_of(whole), &part};
}

Wishes wishes_of(nb::handle given) {
  Wishes wishes;
  if (given.is_none()) return wishes;
  for (const auto& [key, wish] : nb::cast<nb::dict>(given))
    wishes.emplace(argument_of<std::string>(key, "all_gather_tensors"), argument_of<bool>(wish, "all_gather_tensors"));
  return wishes;
}

void bind_dist(nb::module_& module) {
  module.def(
      "init_group",
      [](nb::handle backend, nb::handle init_method, nb::handle world_size, nb::handle rank, nb::handle group_name,
         nb::handle timeout) {
        const auto name = argument_of<std::string>(backend, "backend");
        const dist::InitOptions options{.init_method = argument_of<std::string>(init_method, "init_method"),
                                        .world_size = argument_of<int>(world_size, "world_size"),
                                        .rank = argument_of<int>(rank, "rank"),
                                        .group_name = argument_of<std::string>(group_name, "group_name"),
                                        .timeout = timeout_of(argument_of<Seconds>(timeout, "timeout"))};
        return without_gil([&] { return collectives::init_group(name, options); });
      },
      nb::arg("backend").none(), nb::arg("init_method").none(), nb::arg("world_size").none(), nb::arg("rank").none(),
      nb::arg("group_name").none(), nb::arg("timeout").none(),
      nb::sig("def init_group(backend: str, init_method: str, world_size: int, rank: int, group_name: str, timeout: "
              "float | None) -> Group"),
      "Returns the group of all ranks, which meet as those of init_process_group() in C++. Collective over the job.");
  module.def(
      "made_in",
      [](ProcessGroup& ranks, const nb::callable& make) { return made_in(ranks, [&] { return nb::object(make()); }); },
      nb::arg("ranks"), nb::arg("make"),
      nb::sig("def made_in(ranks: ProcessGroup, make: typing.Callable[[], typing.Any]) -> typing.Any"),
      "Returns make(), the arguments of a collective call. If it raises an exception, this rank takes part in the call "
      "with it, and all ranks raise it.");
  module.def(
      "forget_failed_world",
      [](ProcessGroup& ranks) {
        if (ranks.group().error()) group::forget_world();
      },
      nb::arg("ranks"), "Makes the next call of world() read the environment again, if the group has failed. Local.");
}

void bind_master_worker(nb::module_& module) {
  nb::class_<RemoteTensor>(module, "RemoteTensor", R"(A handle of a tensor on a worker.

After the last handle is deleted, the worker drops the tensor with the next call that it receives.)")
      .def_prop_ro("worker", &RemoteTensor::worker, "The rank of the worker.")
      .def_prop_ro(
          "dtype", [](const RemoteTensor& self) { return std::string(to_string(self.spec().dtype)); },
          "The name of the dtype.")
      .def_prop_ro(
          "shape",
          [](const RemoteTensor& self) {
            nb::list extents;
            for (const std::int64_t extent : self.spec().shape) extents.append(extent);
            return nb::tuple(extents);
          },
          nb::for_getter(nb::sig("def shape(self) -> tuple[int, ...]")), "The extents of the dimensions.");
  nb::class_<MasterWorker>(module, "MasterWorker", R"(A master, rank 0, that controls tensors on the other ranks.

The calls of the master return at once, except wait(), fetch() and shutdown(). Each worker executes its requests in
order. If a request fails on a worker, the next call that waits for that worker raises the error. `timeout`: the longest
wait in seconds. None: the default of the group.

Args:
    group: A muster.Group, a process group of torch.distributed, or None for the world.
    timeout: The longest wait for the other ranks.

Raises:
    InvalidArgumentError: An argument does not match, or this rank may not make the call.
    PeerLostError: A worker or the master died or left.
    TimeoutError: A rank made no progress.)")
      .def(
          "__init__",
          [](MasterWorker* self, nb::handle group, nb::handle timeout) {
            const auto made = group_of(group);
            const CollectiveOptions options = made_for(*made, [&] { return collective_options_of(timeout); });
            new (self) MasterWorker(without_gil([&] { return MasterWorker(*made, options); }));
          },
          nb::arg("group").none() = nb::none(), nb::kw_only(), nb::arg("timeout").none() = nb::none(),
          nb::sig("def __init__(self, group: typing.Any = None, *, timeout: float | None = None) -> None"))
      .def_prop_ro("is_master", &MasterWorker::is_master, "Whether this rank is the master.")
      .def(
          "progress", [](const MasterWorker& self) { self.group().progress(); },
          "Reports to the workers that the master is busy and not stuck. Local.")
      .def(
          "serve",
          [](MasterWorker& self, nb::handle timeout) {
            const CollectiveOptions options = collective_options_of(timeout);
            without_gil([&] { self.serve(options); });
          },
          nb::kw_only(), nb::arg("timeout").none() = nb::none(),
          nb::sig("def serve(self, *, timeout: float | None = None) -> None"),
          "Executes the requests of the master on a worker, until the master calls shutdown().")
      .def(
          "make",
          [](MasterWorker& self, nb::handle worker, nb::handle dtype, nb::handle shape, nb::handle timeout) {
            const int rank = argument_of<int>(worker, "worker");
            const DType made = dtype_of(dtype);
            const auto extents = argument_of<Shape>(shape, "shape");
            const CollectiveOptions options = collective_options_of(timeout);
            return without_gil([&] { return self.make(rank, made, extents, options); });
          },
          nb::arg("worker").none(), nb::arg("dtype").none(), nb::arg("shape").none(), nb::kw_only(),
          nb::arg("timeout").none() = nb::none(),
          nb::sig("def make(self, worker: int, dtype: muster._typing.DTypeLike, shape: typing.Iterable[int], *, "
                  "timeout: float | None = None) -> RemoteTensor"),
          "Creates a tensor of zeros on a worker, and returns its handle.")
      .def(
          "fill",
          [](MasterWorker& self, const RemoteTensor& tensor, nb::handle element, nb::handle timeout) {
            const Tensor value = tensor_of(element);
            const CollectiveOptions options = collective_options_of(timeout);
            without_gil([&] { self.fill(tensor, value, options); });
          },
          nb::arg("tensor"), nb::arg("element"), nb::kw_only(), nb::arg("timeout").none() = nb::none(),
          nb::sig("def fill(self, tensor: RemoteTensor, element: muster._typing.TensorLike, *, timeout: float | None = "
                  "None) -> None"),
          "Sets all elements to that of `element`, a tensor of one element of the same dtype.")
      .def(
          "copy",
          [](MasterWorker& self, const RemoteTensor& to, nb::handle source, nb::handle timeout) {
            const CollectiveOptions options = collective_options_of(timeout);
            if (nb::isinstance<RemoteTensor>(source)) {
              const auto& from = nb::cast<const RemoteTensor&>(source);
              return without_gil([&] { self.copy(to, from, options); });
            }
            const Tensor from = tensor_of(source);
            without_gil([&] { self.copy(to, from, options); });
          },
          nb::arg("to"), nb::arg("source"), nb::kw_only(), nb::arg("timeout").none() = nb::none(),
          nb::sig("def copy(self, to: RemoteTensor, source: RemoteTensor | muster._typing.TensorLike, *, timeout: "
                  "float | None = None) -> None"),
          "Copies the elements of a tensor of the master, or of another remote tensor, which may belong to another "
          "worker.")
      .def(
          "add",
          [](MasterWorker& self, const RemoteTensor& to, const RemoteTensor& other, nb::handle timeout) {
            const CollectiveOptions options = collective_options_of(timeout);
            without_gil([&] { self.add(to, other, options); });
          },
          nb::arg("to"), nb::arg("other"), nb::kw_only(), nb::arg("timeout").none() = nb::none(),
          nb::sig("def add(self, to: RemoteTensor, other: RemoteTensor, *, timeout: float | None = None) -> None"),
          "Adds the elements of another tensor of the same worker.")
      .def(
          "fetch",
          [](MasterWorker& self, const RemoteTensor& tensor, nb::handle timeout) {
            const CollectiveOptions options = collective_options_of(timeout);
            return without_gil([&] { return self.fetch(tensor, options); });
          },
          nb::arg("tensor"), nb::kw_only(), nb::arg("timeout").none() = nb::none(),
          nb::sig("def fetch(self, tensor: RemoteTensor, *, timeout: float | None = None) -> Tensor"),
          "Returns a copy of the tensor.")
      .def(
          "wait",
          [](MasterWorker& self, nb::handle worker, nb::handle timeout) {
            const auto rank = argument_of<Number>(worker, "worker");
            const CollectiveOptions options = collective_options_of(timeout);
            without_gil([&] { rank ? self.wait(*rank, options) : self.wait(options); });
          },
          nb::arg("worker").none() = nb::none(), nb::kw_only(), nb::arg("timeout").none() = nb::none(),
          nb::sig("def wait(self, worker: int | None = None, *, timeout: float | None = None) -> None"),
          "Waits until a worker has executed its requests. None: every worker.")
      .def(
          "shutdown",
          [](MasterWorker& self, nb::handle timeout) {
            const CollectiveOptions options = collective_options_of(timeout);
            without_gil([&] { self.shutdown(options); });
          },
          nb::kw_only(), nb::arg("timeout").none() = nb::none(),
          nb::sig("def shutdown(self, *, timeout: float | None = None) -> None"),
          "Drops all tensors, and makes serve() return on all workers.");
}

struct GilReleased {
  std::optional<Waiting> waiting;
};
/// Its destructor releases the GIL: the group waits for its background calls, which may need the GIL to release their
/// arguments.
class Coordinator : private GilReleased, public GroupCoordinator {
 public:
  using GroupCoordinator::GroupCoordinator;
  ~Coordinator() { waiting.emplace(); }
};

void bind_group_coordinator(nb::module_& module) {
  nb::class_<Coordinator>(module, "GroupCoordinator",
                          "The parts of muster.compat.vllm.GroupCoordinator that the library implements.")
      .def(
          "__init__",
          [](Coordinator* self, nb::handle group_ranks, nb::handle world, nb::handle name) {
            const auto made = group_of(world);
            const auto [lists, text] = made_for(*made, [&] {
              return std::pair{argument_of<Lists>(group_ranks, "group_ranks"),
                               argument_of<std::string>(name, "group_name")};
            });
            without_gil([&] { new (self) Coordinator(lists, *made, text); });
          },
          nb::arg("group_ranks").none(), nb::arg("world").none(), nb::arg("name").none(),
          nb::sig("def __init__(self, group_ranks: typing.Iterable[typing.Iterable[int]], world: Group, name: str) -> "
                  "None"),
          "Divides `world` into groups. Collective over `world`.")
      .def_prop_ro("ranks", &Coordinator::ranks, "The ranks of the group, as numbers of the world.")
      .def_prop_ro(
          "unique_name", [](const Coordinator& self) { return self.unique_name(); }, "The name and a number.")
      .def_prop_ro(
          "process_group",
          [](const nb::object& self) { return owned(part_of(self, nb::cast<Coordinator&>(self).process_group())); },
          "The collectives and messages of the group.")
      .def_prop_ro(
          "group",
          [](const nb::object& self) { return part_of(self, nb::cast<Coordinator&>(self).process_group().group()); },
          "The group.")
      .def(
          "all_reduce",
          [](Coordinator& self, nb::handle tensor) {
            const Tensor own = made_in(self.process_group(), [&] { return tensor_of(tensor); });
            return without_gil([&] { return self.all_reduce(own); });
          },
          nb::arg("tensor").none(), nb::sig("def all_reduce(self, tensor: muster._typing.TensorLike) -> Tensor"),
          "Returns the sum of the tensors of all ranks.")
      .def(
          "prepare",
          [](Coordinator& self, const nb::callable& specs) {
            const auto made = made_for(self.process_group().group(), [&] {
              std::vector<TensorSpec> list;
              for (const nb::handle each : nb::iter(specs()))
                list.push_back({dtype_of(each[0]), argument_of<Shape>(each[1], "shape")});
              return list;
            });
            without_gil([&] { self.prepare_communication_buffer_for_model(made); });
          },
          nb::arg("specs"),
          nb::sig("def prepare(self, specs: typing.Callable[[], typing.Iterable[tuple[muster._typing.DTypeLike, "
                  "typing.Iterable[int]]]]) -> None"),
          "Reserves memory for results of the dtypes and shapes of specs(). Collective.")
      .def(
          "create_mq_broadcaster",
          [](Coordinator& self, nb::handle writer, nb::handle handle, nb::handle capacity) {
            const QueueOptions options = made_in(self.process_group(), [&] {
              return QueueOptions{
                  .writer = argument_of<int>(writer, "writer_rank"),
                  .external_writer =
                      argument_of<std::optional<std::string>>(handle, "external_writer_handle").value_or(""),
                  .capacity = bytes_of(capacity)};
            });
            return owned(
                without_gil([&] { return std::make_shared<MessageQueue>(self.create_mq_broadcaster(options)); }));
          },
          nb::arg("writer").none(), nb::arg("handle").none(), nb::arg("capacity"),
          nb::sig(
              "def create_mq_broadcaster(self, writer: int, handle: str | None, capacity: int | str) -> MessageQueue"),
          "Returns a queue that `writer` writes and all other ranks read. Collective.")
      .def(
          "create_single_reader_mq_broadcasters",
          [](Coordinator& self, nb::handle reader, nb::handle capacity) {
            const auto [rank, options] = made_for(self.process_group().group(), [&] {
              return std::pair{argument_of<int>(reader, "reader_rank_in_group"),
                               QueueOptions{.capacity = bytes_of(capacity)}};
            });
            auto queues = without_gil([&] { return self.create_single_reader_mq_broadcasters(rank, options); });
            nb::list all;
            for (auto& queue : queues.by_writer) all.append(owned(std::move(queue)));
            return nb::make_tuple(owned(std::move(queues.own)), all);
          },
          nb::arg("reader").none(), nb::arg("capacity"),
          nb::sig("def create_single_reader_mq_broadcasters(self, reader: int, capacity: int | str) -> "
                  "tuple[MessageQueue, list[MessageQueue]]"),
          "Returns the queue of this rank, and on the reader the queues of all ranks. Collective.")
      .def(
          "send_tensor_dict",
          [](Coordinator& self, nb::handle dict, nb::handle dst, Coordinator* slices, nb::handle wishes) {
            const auto [values, to, wanted] = converted([&] {
              return std::tuple{config_of(dict), argument_of<Number>(dst, "dst"), wishes_of(wishes)};
            });
            without_gil([&] { self.send_tensor_dict(values.as_object(), to, {slices, wanted, {}}); });
          },
          nb::arg("dict").none(), nb::arg("dst").none(), nb::arg("slices").none(), nb::arg("wishes").none(),
          nb::sig("def send_tensor_dict(self, dict: typing.Any, dst: int | None, slices: GroupCoordinator | None, "
                  "wishes: typing.Any) -> None"),
          "Sends a dict to a rank of the group.")
      .def(
          "recv_tensor_dict",
          [](Coordinator& self, nb::handle src, Coordinator* slices, nb::handle wishes) {
            const auto convert = [&] { return std::pair{argument_of<Number>(src, "src"), wishes_of(wishes)}; };
            // The ranks that gather the slices wait for each other.
            const auto [from, wanted] =
                slices == nullptr ? converted(convert) : made_for(slices->process_group().group(), convert);
            return object_of(Config(without_gil([&] { return self.recv_tensor_dict(from, {slices, wanted, {}}); })));
          },
          nb::arg("src").none(), nb::arg("slices").none(), nb::arg("wishes").none(),
          nb::sig("def recv_tensor_dict(self, src: int | None, slices: GroupCoordinator | None, wishes: typing.Any) -> "
                  "dict[str, typing.Any]"),
          "Returns the next dict from a rank of the group.");
}

}  // namespace

void bind_compat(nb::module_& module) {
  bind_dist(module);
  bind_master_worker(module);
  bind_group_coordinator(module);
}

}  // namespace muster::python
