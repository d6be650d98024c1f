// SPDX-License-Identifier: Apache-2.0
// Groups of ranks.

#include <fmt/core.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "muster/error.hpp"
#include "muster/tcp.hpp"
#include "muster/workspace.hpp"
#include "python/core/arguments.hpp"
#include "python/core/bindings.hpp"
#include "python/core/waiting.hpp"

namespace muster::python {
namespace {

using Seconds = std::optional<double>;

WaitOptions options_of(const Given<Seconds>& timeout) {
  return {.timeout = timeout_of(argument_of<Seconds>(timeout, "timeout"))};
}

nb::object info_of(const Group& group, int rank) {
  const RankInfo& info = group.info(rank);
  nb::dict dict;
  dict["rank"] = info.global_rank;
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
    throw Error(ErrorKind::invalid_argument, fmt::format("a timeout of {} s: it must be more than 0", *seconds));
  return std::chrono::milliseconds(
      std::max<std::int64_t>(1, static_cast<std::int64_t>(std::min(*seconds, longest) * 1000)));
}

RankList list_of(const std::optional<std::vector<int>>& ranks) {
  if (!ranks) return all_ranks;
  return *ranks;
}

std::shared_ptr<Group> group_of(nb::handle group) {
  return nb::cast<std::shared_ptr<Group>>(nb::module_::import_("muster._groups").attr("_resolve")(group));
}

void bind_groups(nb::module_& module) {
  nb::class_<Group>(module, "Group",
                    "The ranks of a job, or some of them. One thread at a time uses a group. A timeout, a lost "
                    "rank or a cancelled wait aborts it: every later call on every rank raises that first error. "
                    "After any other error it remains usable.")
      .def_prop_ro("rank", &Group::rank)
      .def_prop_ro("size", &Group::size)
      .def_prop_ro("kind", [](const Group& self) { return std::string(self.kind()); })
      .def_prop_rw(
          "timeout", [](const Group& self) { return static_cast<double>(self.timeout().count()) / 1000; },
          [](Group& self, double seconds) { self.set_timeout(*timeout_of(seconds)); },
          "The default deadline of waits, in seconds.")
      .def("info", info_of, nb::arg("rank"),
           "Returns a dict that identifies a rank: rank (its number in the job), host, pid.")
      .def(
          "barrier",
          [](Group& self, const Given<Seconds>& timeout) {
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
          nb::arg("timeout") = nb::none(), "Returns when all ranks have entered the barrier. Collective.")
      .def(
          "duplicate",
          [](Group& self, const Given<Seconds>& timeout) {
            const WaitOptions options = made_for(self, [&] { return options_of(timeout); });
            return without_gil([&] { return self.duplicate(options); });
          },
          nb::arg("timeout") = nb::none(),
          "Returns a group of the same ranks, with separate rounds and failures. Collective.")
      .def(
          "split",
          [](Group& self, const Given<std::vector<int>>& ranks, const Given<Seconds>& timeout) {
            const auto [list, options] = made_for(self, [&] {
              return std::pair{argument_of<std::vector<int>>(ranks, "ranks"), options_of(timeout)};
            });
            auto part = without_gil([&] { return self.split(list, options); });
            return part ? std::optional(std::move(part)) : std::nullopt;
          },
          nb::arg("ranks"), nb::arg("timeout") = nb::none(),
          "Returns the group of the ranks of a list, in the order of the list; None on a rank that is not in its list. "
          "Collective.")
      .def("progress", &Group::progress, "Reports to waiting ranks that this rank is busy and not stuck. Local.")
      .def("__repr__", [](const Group& self) {
        return fmt::format("muster.Group({}, rank {} of {})", self.kind(), self.rank(), self.size());
      });
  module.def("world", [] { return without_gil([] { return world(); }); });
  module.def(
      "set_world", [](std::shared_ptr<Group> group) { without_gil([&] { set_world(std::move(group)); }); },
      nb::arg("group").none());
  module.def("single_group", [] { return without_gil([] { return single_group(); }); });
  module.def("local_group", [](std::string key, int rank, int size, Seconds timeout, std::vector<int> numbers) {
    return without_gil([&] {
      return local_group({.key = std::move(key),
                          .rank = rank,
                          .size = size,
                          .timeout = timeout_of(timeout),
                          .global_ranks = std::move(numbers)});
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
