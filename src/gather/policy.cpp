// SPDX-License-Identifier: Apache-2.0
// The policy: which route an exchange takes.

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "src/gather/route.hpp"
#include "src/os/process.hpp"
#include "src/shm/arena_core.hpp"

namespace muster {

std::string_view to_string(Route route) noexcept {
  switch (route) {
    case Route::automatic:
      return "automatic";
    case Route::local:
      return "local";
    case Route::shm:
      return "shm";
    case Route::workspace:
      return "workspace";
  }
  return "unknown";
}

namespace gather {
namespace {

constexpr std::array routes_to_force = {Route::automatic, Route::local, Route::shm, Route::workspace};

std::string names_of(std::uint8_t routes) {
  std::string names;
  for (const Route route : routes_to_force)
    if ((routes & route_bit(route)) != 0) names += (names.empty() ? "" : ", ") + std::string(to_string(route));
  return names.empty() ? "none" : names;
}

}  // namespace

bool RouteDriver::moves(const TensorView& tensor) const {
  return !tensor.is_contiguous() || !detail::ArenaCore::find(tensor.data(), tensor.nbytes());
}

std::unique_ptr<Proof> RouteDriver::prove(const Call&, Record&) const {
  return nullptr;
}

RouteTable::RouteTable() {
  add(make_local_route());
  add(make_shm_route());
  add(make_workspace_route());
}

RouteTable& RouteTable::instance() {
  static RouteTable table;
  return table;
}

void RouteTable::add(std::unique_ptr<RouteDriver> driver) {
  drivers_.push_back(std::move(driver));
}

const RouteDriver* RouteTable::find(Route route) const noexcept {
  const auto found = std::ranges::find_if(drivers_, [&](const auto& driver) { return driver->route() == route; });
  return found == drivers_.end() ? nullptr : found->get();
}

Choice choose_route(std::uint32_t length, std::uint8_t routes, Route forced, std::span<const Route> preference) {
  if (forced != Route::automatic) {
    if ((routes & route_bit(forced)) == 0)
      throw Error(ErrorKind::unsupported,
                  fmt::format("the route '{}' is forced, but the {} ranks of the list have in common: {}",
                              to_string(forced), length, names_of(routes)));
    return {forced, "forced"};
  }
  for (const Route route : preference)
    if ((routes & route_bit(route)) != 0) return {route, {}};
  throw Error(ErrorKind::unsupported, fmt::format("no route reaches all {} ranks of the list: they share no memory, "
                                                  "and no workspace_path is given (a directory "
                                                  "that all of them see)",
                                                  length));
}

std::uint8_t usable_routes(const Call& call) {
  std::uint8_t routes = 0;
  for (const auto& driver : RouteTable::instance().drivers())
    if (driver->is_usable(call)) routes |= route_bit(driver->route());
  return routes;
}

Route forced_route(const GatherOptions& options) {
  if (!options.workspace_path.empty()) {
    if (options.route != Route::automatic && options.route != Route::workspace)
      throw Error(ErrorKind::argument, fmt::format("workspace_path is given, and the route '{}' is forced: one of them",
                                                   to_string(options.route)));
    return Route::workspace;
  }
  if (options.keep_files || options.zstd_level)
    throw Error(ErrorKind::argument, "keep_files and zstd_level need a workspace_path: other routes have no files");
  if (options.route != Route::automatic) return options.route;
  const auto name = os::environment("MUSTER_ROUTE");
  if (!name) return Route::automatic;
  for (const Route route : routes_to_force)
    if (*name == to_string(route)) return route;
  throw Error(ErrorKind::argument, "MUSTER_ROUTE is '" + *name + "': it must be automatic, local, shm or workspace");
}

}  // namespace gather
}  // namespace muster
