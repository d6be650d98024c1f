// SPDX-License-Identifier: Apache-2.0
// The routing policy as a pure function: rows of docs/explanation/routes.md, and rules for every combination of facts.

#include <algorithm>
#include <array>
#include <cstdlib>

#include "doctest/doctest.h"
#include "muster/error.hpp"
#include "src/gather/policy.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::gather;

namespace {

constexpr std::array all_routes = {Route::local, Route::shm, Route::workspace, Route::mpi, Route::tcp, Route::device};
constexpr std::array all_operations = {GatherKind::configs, GatherKind::tensors, GatherKind::merge, GatherKind::stream};
constexpr std::array all_residencies = {Residency::none, Residency::host, Residency::device, Residency::mixed};

std::uint8_t bits(std::initializer_list<Route> routes) {
  std::uint8_t all = 0;
  for (const Route route : routes) all |= route_bit(route);
  return all;
}

bool includes(std::uint8_t routes, Route route) {
  return (routes & route_bit(route)) != 0;
}

Decision refused(NoRouteReason refusal, Route route = Route::auto_) {
  return {route, refusal};
}

/// Every possible combination of facts.
template <class Visit>
void for_all_facts(const Visit& visit) {
  for (const GatherKind operation : all_operations)
    for (const Residency residency : all_residencies)
      for (std::uint8_t forced = 0; forced <= static_cast<std::uint8_t>(Route::device); ++forced)
        for (unsigned some = 0; some < (1U << all_routes.size()); ++some)
          visit(RouteFacts{.operation = operation,
                           .routes = static_cast<std::uint8_t>(some << 1),
                           .forced = static_cast<Route>(forced),
                           .residency = residency});
}

}  // namespace

// NOLINTNEXTLINE(readability-function-cognitive-complexity): one clause a rule
TEST_CASE("every combination of facts has the outcome that the rules of docs/explanation/routes.md require") {
  std::size_t seen = 0;
  for_all_facts([&](const RouteFacts& facts) {
    ++seen;
    const Decision decision = choose_route(facts);
    const bool on_devices = facts.residency == Residency::device;
    const bool host_only = facts.operation == GatherKind::merge || facts.operation == GatherKind::stream;
    CAPTURE(static_cast<int>(facts.operation));
    CAPTURE(static_cast<int>(facts.residency));
    CAPTURE(to_string(facts.forced));
    CAPTURE(static_cast<int>(facts.routes));
    CAPTURE(to_string(decision.route));
    CAPTURE(static_cast<int>(decision.refusal));
    // All ranks can use the selected route, and it is the forced one if a route is forced.
    if (!decision.is_refused()) {
      REQUIRE(includes(facts.routes, decision.route));
      REQUIRE((facts.forced == Route::auto_ || decision.route == facts.forced));
      REQUIRE(facts.residency != Residency::mixed);
      REQUIRE((!on_devices || decision.route == Route::device));
      REQUIRE((decision.route != Route::device || facts.residency != Residency::host));
      REQUIRE((decision.route != Route::device || !host_only || (on_devices && facts.operation == GatherKind::stream)));
    }
    // A refusal has the first cause that applies.
    if (facts.residency == Residency::mixed) {
      REQUIRE(decision == refused(NoRouteReason::mixed));
    } else if (on_devices && facts.operation == GatherKind::merge) {
      REQUIRE(decision == refused(NoRouteReason::merges_devices));
    } else if (on_devices && facts.forced != Route::auto_ && facts.forced != Route::device) {
      REQUIRE(decision == refused(NoRouteReason::forced_off_devices, facts.forced));
    } else if (on_devices) {
      REQUIRE(decision.is_refused() != includes(facts.routes, Route::device));
      if (decision.is_refused()) REQUIRE(decision == refused(NoRouteReason::no_device_route, Route::device));
    } else if (facts.forced == Route::device && (facts.residency == Residency::host || host_only)) {
      REQUIRE(decision == refused(NoRouteReason::forced_onto_devices, Route::device));
    } else if (facts.forced != Route::auto_) {
      REQUIRE(decision.is_refused() != includes(facts.routes, facts.forced));
      if (decision.is_refused()) REQUIRE(decision == refused(NoRouteReason::forced_unusable, facts.forced));
    } else {
      const bool reachable = (facts.routes & ~route_bit(Route::device)) != 0;
      REQUIRE(decision.is_refused() != reachable);
      if (decision.is_refused()) REQUIRE(decision == refused(NoRouteReason::unreachable));
    }
  });
  CHECK(seen == 4 * 4 * 7 * 64);
}

TEST_CASE("routes have one order of preference, and one more route never makes the result worse") {
  constexpr std::array order = {Route::local, Route::shm, Route::mpi, Route::tcp, Route::workspace};
  const auto place = [&](Route route) { return std::ranges::find(order, route) - order.begin(); };
  for_all_facts([&](const RouteFacts& facts) {
    const Decision decision = choose_route(facts);
    if (facts.forced == Route::auto_ && !decision.is_refused() && facts.residency != Residency::device)
      for (const Route better : order)
        if (place(better) < place(decision.route)) REQUIRE(!includes(facts.routes, better));
    for (const Route more : all_routes) {
      RouteFacts richer = facts;
      richer.routes |= route_bit(more);
      const Decision then = choose_route(richer);
      // The decision may only change to the added route, and never to a refusal.
      REQUIRE((then == decision || then.route == more));
      REQUIRE((decision.is_refused() || !then.is_refused()));
    }
  });
}

TEST_CASE("rows of docs/explanation/routes.md") {
  const std::uint8_t host = bits({Route::shm, Route::mpi});
  CHECK(choose_route({.routes = bits({Route::local, Route::shm, Route::mpi})}).route == Route::local);
  CHECK(choose_route({.routes = host, .residency = Residency::host}).route == Route::shm);
  CHECK(choose_route({.routes = bits({Route::mpi}), .residency = Residency::host}).route == Route::mpi);
  CHECK(choose_route({.routes = bits({Route::workspace}), .residency = Residency::host}).route == Route::workspace);
  CHECK(choose_route({.routes = bits({Route::shm, Route::workspace}), .forced = Route::workspace}).route ==
        Route::workspace);
  // The device route is preferred to all host routes. This also holds for a single rank, because its tensors must be
  // stored where the caller requests.
  CHECK(choose_route({.routes = bits({Route::local, Route::device}), .residency = Residency::device}).route ==
        Route::device);
  CHECK(choose_route({.routes = bits({Route::shm, Route::device}), .residency = Residency::host}).route == Route::shm);
}

TEST_CASE("a list has the routes that all its ranks have; the tensors of all ranks count") {
  std::vector<ExchangeRecord> records(4);
  records[0] = {.routes = bits({Route::shm, Route::mpi, Route::device})};
  records[1] = {.routes = bits({Route::mpi, Route::device}), .residency = Residency::device};
  records[2] = {.routes = bits({Route::mpi, Route::device})};
  records[3] = {.routes = bits({Route::shm}), .residency = Residency::host};
  const std::vector<int> three = {0, 1, 2};
  CHECK(facts_of(three, records) ==
        RouteFacts{.routes = bits({Route::mpi, Route::device}), .residency = Residency::device});
  // Ranks without tensors follow the rank that has some, whatever they would have guessed.
  CHECK(choose_route(facts_of(records[0])).route == Route::shm);
  CHECK(choose_route(facts_of(records[2])).route == Route::mpi);
  CHECK(decide(three, records) == Decision{Route::device, NoRouteReason::none});
  const std::vector<int> mixed = {1, 3};
  CHECK(decide(mixed, records) == refused(NoRouteReason::mixed));
  CHECK(ranks_of(decide(mixed, records), mixed, records) == mixed);
}

TEST_CASE("a rank that has prepared tensors for a route that the others cannot use is named") {
  std::vector<ExchangeRecord> records(2);
  records[0] = {.routes = bits({Route::mpi}), .residency = Residency::host};
  records[1] = {.routes = bits({Route::shm, Route::mpi}), .residency = Residency::host};
  const std::vector<int> both = {0, 1};
  const Decision decision = decide(both, records);
  CHECK(decision == refused(NoRouteReason::unfit, Route::mpi));
  CHECK(ranks_of(decision, both, records) == std::vector<int>{1});
  // If the route is forced, both ranks have prepared for it.
  for (ExchangeRecord& record : records) record.forced = Route::mpi;
  CHECK(decide(both, records) == Decision{Route::mpi, NoRouteReason::none});
}

TEST_CASE("the forced route, and the setting that forces it") {
  ::unsetenv("MUSTER_ROUTE");
  CHECK(forcing_of({}).route == Route::auto_);
  CHECK(forced_text(forcing_of({})).empty());
  const Forcing caller = forcing_of({.route = Route::mpi});
  CHECK(caller.route == Route::mpi);
  CHECK(forced_text(caller) == "forced by the caller");
  for (const Route route : all_routes) {
    ::setenv("MUSTER_ROUTE", std::string(to_string(route)).c_str(), 1);
    CHECK(forcing_of({}).route == route);
    CHECK(forced_text(forcing_of({})) == "forced by MUSTER_ROUTE");
  }
  // The option of the call takes precedence.
  CHECK(forced_text(forcing_of({.route = Route::shm})) == "forced by the caller");
  const Forcing path = forcing_of({.workspace = {.path = "/w"}});
  CHECK(path.route == Route::workspace);
  CHECK(forced_text(path) == "forced by workspace.path");
  ::setenv("MUSTER_ROUTE", "auto", 1);
  CHECK(forced_text(forcing_of({})).empty());
  ::setenv("MUSTER_ROUTE", "pigeon", 1);
  const std::string words = test::words_of(ErrorKind::invalid_argument, [] { (void)forcing_of({}); });
  CHECK(test::has(words, "\"pigeon\": it must be auto, local, shm, workspace, mpi, tcp or device"));
  ::unsetenv("MUSTER_ROUTE");
  CHECK_THROWS_AS((void)forcing_of({.route = Route::shm, .workspace = {.path = "/w"}}), Error);
}

TEST_CASE("the location of tensors: tensors without elements have none") {
  std::array<std::uint8_t, 8> memory{};
  const auto on = [&](Device device, std::int64_t elements) {
    return Config(Tensor::borrow(TensorView(DType::u8, {elements}, memory.data(), {}, device)));
  };
  const Device host;
  const Device first{Device::Kind::cuda, 0};
  const Device second{Device::Kind::cuda, 1};
  CHECK(residency_of(Config("text")) == Residency::none);
  CHECK(residency_of(on(host, 0)) == Residency::none);
  CHECK(residency_of(on(host, 3)) == Residency::host);
  CHECK(residency_of(on(first, 0)) == Residency::none);
  Config tree = Config::object({{"a", on(first, 4)}, {"b", Config::array({on(second, 1), on(host, 0), Config(3)})}});
  CHECK(residency_of(tree) == Residency::device);
  CHECK(places_text(tree) == "cuda:0 and cuda:1");
  tree["c"] = on(host, 1);
  CHECK(residency_of(tree) == Residency::mixed);
  CHECK(places_text(tree) == "cuda:0, cuda:1 and the host");
  CHECK(places_text(Config(1)) == "no tensors");
}
