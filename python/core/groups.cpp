// SPDX-License-Identifier: Apache-2.0
// Groups of ranks.

#include <fmt/core.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>

#include "muster/error.hpp"
#include "muster/tcp.hpp"
#include "muster/workspace.hpp"
#include "python/core/arguments.hpp"
#include "python/core/bindings.hpp"
#include "python/core/waiting.hpp"
#include "src/rendezvous/world.hpp"

namespace muster::python {
namespace {

/// The Python objects of groups, so that one group has one object. The GIL protects it.
std::unordered_map<const Group*, PyObject*>& objects_of_groups() {
  static auto* objects = new std::unordered_map<const Group*, PyObject*>;  // used until the interpreter ends
  return *objects;
}

using Seconds = std::optional<double>;

WaitOptions options_of(nb::handle timeout) {
  return {.timeout = timeout_of(argument_of<Seconds>(timeout, "timeout"))};
}

Dict info_of(const Group& group, int rank) {
  const RankInfo& info = group.info(rank);
  nb::dict dict;
  dict["global_rank"] = info.global_rank;
  dict["host"] = info.host;
  dict["pid"] = info.pid;
  return dict;
}

}  // namespace

std::optional<std::chrono::milliseconds> timeout_of(std::optional<double> seconds) {
  if (!seconds) return std::nullopt;
  // A year is long enough to mean "no deadline", and fits every clock.
  constexpr double longest = 31'536'000;
  if (!(*seconds > 0))
    throw Error(ErrorKind::invalid_argument, fmt::format("timeout: {} s is not more than 0", *seconds));
  return std::chrono::milliseconds(
      std::max<std::int64_t>(1, static_cast<std::int64_t>(std::min(*seconds, longest) * 1000)));
}

RankList list_of(const std::optional<std::vector<int>>& ranks) {
  if (!ranks) return all_ranks;
  return *ranks;
}

void forget_object_of(const Group* group) noexcept {
  if (group != nullptr) objects_of_groups().erase(group);
}

nb::object object_of_group(const std::shared_ptr<Group>& group) {
  if (!group) return nb::none();
  auto& objects = objects_of_groups();
  if (const auto found = objects.find(group.get()); found != objects.end()) return nb::borrow(found->second);
  nb::object made = nb::cast(Closable<Group>(group));
  objects.emplace(group.get(), made.ptr());
  return made;
}

void leave_world(const Group& group) {
  group::leave_world(group);
}

void refuse_closed(const char* name) {
  throw Error(ErrorKind::invalid_argument,
              fmt::format("{}: it was closed: use it before close(), or make a new one", name));
}

std::shared_ptr<Group> group_of(nb::handle group) {
  return nb::cast<std::shared_ptr<Group>>(nb::module_::import_("muster._groups").attr("_resolve")(group));
}

void bind_groups(nb::module_& module) {
  nb::class_<Closable<Group>> type(module, "Group",
                                   R"(The ranks of a job, or some of them.

One thread at a time uses a group. TimeoutError, PeerLostError and CancelledError abort it: every later call on every
rank raises that first error. After any other error the group remains usable. `timeout` of a call: the longest wait
without progress of the awaited ranks, in seconds. None: the default of the group.

`with` closes the group at the end of its block.)");
  type.def_prop_ro(
          "rank", [](const Group& self) { return self.rank(); },
          "The rank of this process in the group, from 0 to size - 1.")
      .def_prop_ro(
          "size", [](const Group& self) { return self.size(); }, "The number of ranks.")
      .def_prop_ro(
          "kind", [](const Group& self) { return std::string(self.kind()); },
          "The kind of the group, such as 'local', 'tcp' or 'single'.")
      .def_prop_rw(
          "timeout", [](const Group& self) { return static_cast<double>(self.timeout().count()) / 1000; },
          [](Group& self, double seconds) { self.set_timeout(*timeout_of(seconds)); },
          "The default deadline of waits, in seconds.")
      .def("info", info_of, nb::arg("rank"),
           R"(Returns a dict that identifies the process of a rank: global_rank, host, pid. Local.

Raises:
    InvalidArgumentError: The group has no such rank.)")
      .def(
          "barrier",
          [](Group& self, nb::handle timeout) {
            std::optional<Error> refused;
            WaitOptions options;
            try {
              options = converted([&] { return options_of(timeout); });
            } catch (const Error& error) {
              refused = error;
            }
            // A barrier transfers no error. This rank still takes part, so that the group remains usable.
            without_gil([&] { self.barrier(options); });
            if (refused) throw Error(*refused);
          },
          nb::arg("timeout").none() = nb::none(), nb::sig("def barrier(self, timeout: float | None = None) -> None"),
          R"(Waits until all ranks have entered the barrier. Collective.

Raises:
    TimeoutError: Ranks did not arrive. The message names them.
    PeerLostError: A rank died or left.
    CancelledError: The wait was interrupted on a rank.)")
      .def(
          "duplicate",
          [](Group& self, nb::handle timeout) {
            const WaitOptions options = made_for(self, [&] { return options_of(timeout); });
            return without_gil([&] { return self.duplicate(options); });
          },
          nb::arg("timeout").none() = nb::none(), nb::sig("def duplicate(self, timeout: float | None = None) -> Group"),
          R"(Returns a group of the same ranks, with separate rounds and failures. Collective.

Raises:
    Error: As barrier().)")
      .def(
          "split",
          [](Group& self, nb::handle ranks, nb::handle timeout) {
            const auto [list, options] = made_for(self, [&] {
              return std::pair{argument_of<std::vector<int>>(ranks, "ranks"), options_of(timeout)};
            });
            auto part = without_gil([&] { return self.split(list, options); });
            return part ? std::optional(std::move(part)) : std::nullopt;
          },
          nb::arg("ranks").none(), nb::arg("timeout").none() = nb::none(),
          nb::sig(
              "def split(self, ranks: collections.abc.Iterable[int], timeout: float | None = None) -> Group | None"),
          R"(Returns a group of the ranks of a list, in the order of the list. Collective.

Args:
    ranks: The list, the same on all of its members. The lists of a call are disjoint.

Returns:
    The group, or None on a rank that is not in its list.

Raises:
    InvalidArgumentError: A list is invalid. All ranks raise it.
    RankMismatchError: Members of a list pass different lists. All ranks raise it.
    Error: As barrier().)")
      .def(
          "progress", [](Group& self) { self.progress(); },
          "Reports to waiting ranks that this rank is busy and not stuck. Local.")
      .def("__repr__", [](const Closable<Group>& self) -> std::string {
        if (!self.object()) return "muster.Group(closed)";
        const Group& group = *self.object();
        return fmt::format("muster.Group({}, rank {} of {})", group.kind(), group.rank(), group.size());
      });
  def_closing<Group>(type,
                     R"(Leaves the group and releases its memory. Local; a second call does nothing.

Later calls raise InvalidArgumentError here, and ranks that wait for this one raise PeerLostError. Close a group after
its last call on all ranks, such as after a barrier(). It waits for gathers that run in the background. Process groups,
queues and results made from the group remain valid. If the group is that of world(), the next call of world() forms a
new one.)",
                     "def __enter__(self) -> Group");
  module.def("world", [] { return without_gil([] { return world(); }); });
  module.def(
      "set_world", [](std::shared_ptr<Group> group) { without_gil([&] { set_world(std::move(group)); }); },
      nb::arg("group").none());
  module.def("single_group", [] { return without_gil([] { return single_group(); }); });
  module.def("local_group", [](std::string key, int rank, int size, Seconds timeout, std::vector<int> global_ranks) {
    return without_gil([&] {
      return local_group({.key = std::move(key),
                          .rank = rank,
                          .size = size,
                          .timeout = timeout_of(timeout),
                          .global_ranks = std::move(global_ranks)});
    });
  });
  module.def("tcp_group", [](std::string address, int rank, int size, Seconds timeout, std::string key, int listener) {
    return without_gil([&] {
      return tcp_group({.address = std::move(address),
                        .rank = rank,
                        .size = size,
                        .timeout = timeout_of(timeout),
                        .key = std::move(key),
                        .listener = listener});
    });
  });
  module.def("file_group", [](std::string directory, int rank, int size, Seconds timeout, std::string key) {
    return without_gil([&] {
      return file_group({.directory = std::move(directory),
                         .key = std::move(key),
                         .rank = rank,
                         .size = size,
                         .timeout = timeout_of(timeout)});
    });
  });
}

}  // namespace muster::python
