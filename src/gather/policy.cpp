// SPDX-License-Identifier: Apache-2.0
// The policy's decision, its input, and the messages about it.

#include "src/gather/policy.hpp"
#include <fmt/core.h>
#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include "src/base/escaped.hpp"
#include "src/base/message.hpp"
#include "src/gather/merge_record.hpp"
#include "src/gather/opening.hpp"
#include "src/gather/route.hpp"
#include "src/os/pages.hpp"
#include "src/os/process.hpp"
#include "src/shm/segment.hpp"

namespace muster {
namespace {

constexpr std::array names = {std::string_view("auto"),      std::string_view("local"), std::string_view("shm"),
                              std::string_view("workspace"), std::string_view("mpi"),   std::string_view("tcp"),
                              std::string_view("device")};
static_assert(names.size() == static_cast<std::size_t>(Route::device) + 1, "one name a route");

}  // namespace

std::string_view to_string(Route route) noexcept {
  const auto at = static_cast<std::size_t>(route);
  return at < names.size() ? names[at] : "unknown";
}

namespace gather {
namespace {

// In order of preference: shared memory between ranks of one host, then the transport between hosts (a group has one),
// and last a shared directory.
constexpr std::array on_the_host = {Route::shm, Route::mpi, Route::tcp, Route::workspace};

bool allows(const RouteFacts& facts, Route route) noexcept {
  return (facts.routes & route_bit(route)) != 0;
}

Decision refuse(NoRouteReason refusal, Route route = Route::auto_) noexcept {
  return {route, refusal};
}

Decision choose_for_devices(const RouteFacts& facts) noexcept {
  if (facts.operation == GatherKind::merge) return refuse(NoRouteReason::merges_devices);
  if (facts.forced != Route::auto_ && facts.forced != Route::device)
    return refuse(NoRouteReason::forced_off_devices, facts.forced);
  if (!allows(facts, Route::device)) return refuse(NoRouteReason::no_device_route, Route::device);
  return {Route::device, NoRouteReason::none};
}

}  // namespace

Decision choose_route(const RouteFacts& facts) noexcept {
  if (facts.residency == Residency::mixed) return refuse(NoRouteReason::mixed);
  if (facts.residency == Residency::device) return choose_for_devices(facts);
  if (facts.forced == Route::device && (facts.residency == Residency::host || facts.operation == GatherKind::merge ||
                                        facts.operation == GatherKind::stream))
    return refuse(NoRouteReason::forced_onto_devices, Route::device);
  if (facts.forced != Route::auto_)
    return allows(facts, facts.forced) ? Decision{facts.forced, NoRouteReason::none}
                                       : refuse(NoRouteReason::forced_unusable, facts.forced);
  if (allows(facts, Route::local)) return {Route::local, NoRouteReason::none};
  for (const Route route : on_the_host)
    if (allows(facts, route)) return {route, NoRouteReason::none};
  return refuse(NoRouteReason::unreachable);
}

RouteFacts facts_of(const ExchangeRecord& record) noexcept {
  return {
      .operation = record.operation, .routes = record.routes, .forced = record.forced, .residency = record.residency};
}

RouteFacts facts_of(std::span<const int> members, const Records& records) noexcept {
  RouteFacts facts = facts_of(records[static_cast<std::size_t>(members.front())]);
  for (const int rank : members.subspan(1)) {
    const ExchangeRecord& record = records[static_cast<std::size_t>(rank)];
    facts.routes &= record.routes;
    facts.residency = facts.residency | record.residency;
  }
  return facts;
}

namespace {

/// Returns whether the rank has prepared its tensors for another route.
bool is_unfit(const ExchangeRecord& record, Route route) {
  return record.residency != Residency::none && choose_route(facts_of(record)) != Decision{route, NoRouteReason::none};
}

/// Visits the tensors that have elements.
void visit_tensors(const Config& value, const auto& visit) {
  for_each_leaf(value, [&](const Config& leaf) {
    if (leaf.is_tensor() && leaf.as_tensor().view().element_count() != 0) visit(leaf.as_tensor().view());
  });
}

}  // namespace

Decision decide(std::span<const int> members, const Records& records) {
  const Decision decision = choose_route(facts_of(members, records));
  if (decision.is_refused()) return decision;
  const bool fits = std::ranges::none_of(
      members, [&](int rank) { return is_unfit(records[static_cast<std::size_t>(rank)], decision.route); });
  return fits ? decision : refuse(NoRouteReason::unfit, decision.route);
}

std::vector<int> ranks_of(const Decision& refused, std::span<const int> members, const Records& records) {
  const auto is_about = [&](int rank) {
    const ExchangeRecord& record = records[static_cast<std::size_t>(rank)];
    switch (refused.refusal) {
      case NoRouteReason::forced_unusable:
      case NoRouteReason::no_device_route:
        return (record.routes & route_bit(refused.route)) == 0;
      case NoRouteReason::mixed:
      case NoRouteReason::merges_devices:
      case NoRouteReason::forced_off_devices:
      case NoRouteReason::forced_onto_devices:
        return record.residency != Residency::none || record.operation == GatherKind::stream;
      case NoRouteReason::unfit:
        return is_unfit(record, refused.route);
      default:
        return true;
    }
  };
  std::vector<int> ranks;
  std::ranges::copy_if(members, std::back_inserter(ranks), is_about);
  if (ranks.empty()) ranks.assign(members.begin(), members.end());
  return ranks;
}

Residency residency_of(const Config& value) {
  Residency all = Residency::none;
  visit_tensors(value, [&](const TensorView& view) {
    all = all | (view.device().is_host() ? Residency::host : Residency::device);
  });
  return all;
}

std::string places_text(const Config& value) {
  std::vector<Device> places;
  visit_tensors(value, [&](const TensorView& view) {
    if (places.size() < 8 && std::ranges::find(places, view.device()) == places.end()) places.push_back(view.device());
  });
  std::string text;
  for (std::size_t i = 0; i < places.size(); ++i)
    text += std::string(i == 0                   ? ""
                        : i + 1 == places.size() ? " and "
                                                 : ", ") +
            (places[i].is_host() ? "the host" : to_string(places[i]));
  return text.empty() ? "no tensors" : text;
}

Forcing forcing_of(const GatherOptions& options) {
  if (!options.workspace.path.empty()) {
    if (options.route != Route::auto_ && options.route != Route::workspace)
      throw Error(ErrorKind::invalid_argument, "workspace.path is set, but the route " +
                                                   in_quotes(to_string(options.route)) +
                                                   " is forced. Use only one of them");
    return {Route::workspace, ForcedBy::workspace_path};
  }
  if (options.workspace.keep_files || options.workspace.zstd_level)
    throw Error(ErrorKind::invalid_argument,
                "workspace.keep_files and zstd_level need workspace.path: other routes have no files");
  if (options.route != Route::auto_) return {options.route, ForcedBy::caller};
  const auto name = os::environment("MUSTER_ROUTE");
  if (!name) return {};
  std::string known;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const auto route = static_cast<Route>(i);
    if (*name == names[i]) return {route, route == Route::auto_ ? ForcedBy::nobody : ForcedBy::environment};
    known += std::string(i == 0 ? "" : i + 1 == names.size() ? " or " : ", ") + std::string(names[i]);
  }
  throw Error(ErrorKind::invalid_argument, "MUSTER_ROUTE is " + in_quotes(*name) + ": it must be " + known);
}

}  // namespace gather
}  // namespace muster

// Messages about the policy's decisions. docs/reference/errors.md quotes them.

namespace muster::gather {
namespace {

/// Returns which library a program must be linked with for a route that has its own library.
const char* not_loaded(Route route) {
  switch (route) {
    case Route::mpi:
      return "libmuster-mpi is not loaded (link the program with it: pkg-config muster-mpi)";
    case Route::device:
      return "libmuster-cuda is not loaded (link the program with it: pkg-config muster-cuda; or copy the tensors to "
             "the host first)";
    default:
      return "this program has no such route";
  }
}

constexpr std::size_t shown = 8;

}  // namespace

std::string forced_text(Forcing forcing) {
  constexpr std::array<const char*, 4> words = {"", "forced by the caller", "forced by workspace.path",
                                                "forced by MUSTER_ROUTE"};
  const auto number = static_cast<std::size_t>(forcing.by);
  return number < words.size() ? words[number] : "";
}

std::string names_of(std::uint8_t routes) {
  std::string text;
  for (std::uint8_t i = 1; i < 8; ++i)
    if ((routes & (1U << i)) != 0) text += (text.empty() ? "" : ", ") + std::string(to_string(static_cast<Route>(i)));
  return text.empty() ? "none" : text;
}

std::string refusal_words(const GatherCall& call, const Decision& refused) {
  switch (refused.refusal) {
    case NoRouteReason::forced_unusable:
    case NoRouteReason::no_device_route: {
      const RouteDriver* driver = RouteTable::instance().find(refused.route);
      return driver == nullptr ? not_loaded(refused.route) : driver->obstacle(call);
    }
    case NoRouteReason::unreachable: {
      std::string text;
      for (const auto& driver : RouteTable::instance().drivers())
        if (!driver->is_usable(call))
          text += fmt::format("{}{}: {}", text.empty() ? "" : ", ", to_string(driver->route()), driver->obstacle(call));
      return text;
    }
    case NoRouteReason::unfit:
      return {};
    default:
      return call.value == nullptr ? "the host" : places_text(*call.value);
  }
}

std::string refusal_text(const Group& group, const Decision& refused, std::span<const int> ranks,
                         const Records& records, std::span<const Words> words) {
  const std::vector<int> list = list_of(ranks.front(), records);
  const RouteFacts facts = facts_of(list, records);
  const ExchangeRecord& first = records[static_cast<std::size_t>(ranks.front())];
  const std::string who = fmt::format("the list {}", list_text(list));
  const std::string forced = fmt::format("the route {} is {}", in_quotes(to_string(first.forced)),
                                         forced_text({first.forced, first.forced_by}));
  switch (refused.refusal) {
    case NoRouteReason::none:
      break;
    case NoRouteReason::mixed:
      return fmt::format(
          "some tensors of {} are on the host, and some on devices ({}). Gather them in two calls, or copy all of them "
          "to the host first",
          who, each_words(group, ranks, words, ": ", shown));
    case NoRouteReason::merges_devices:
      return fmt::format(
          "CPU tensors are needed, but ranks of {} passed GPU tensors ({}). Copy them to host memory "
          "first, or gather them and merge the result",
          who, each_words(group, ranks, words, ": ", shown));
    case NoRouteReason::forced_off_devices:
      return fmt::format(
          "{}, which needs tensors on the host, but those of {} are on devices ({}). Copy them to the host first, or "
          "force no route",
          forced, who, each_words(group, ranks, words, ": ", shown));
    case NoRouteReason::no_device_route:
      return fmt::format("tensors of {} are on devices, and not all of its ranks can receive them: {}", who,
                         each_words(group, ranks, words, ": ", shown));
    case NoRouteReason::forced_onto_devices:
      if (first.operation == GatherKind::merge || first.operation == GatherKind::stream)
        return fmt::format("{}, but {} needs tensors on the host. Force no route", forced, to_string(first.operation));
      return fmt::format("{}, but the tensors of {} are on the host ({}). Force no route", forced, who,
                         each_words(group, ranks, words, ": ", shown));
    case NoRouteReason::forced_unusable:
      return fmt::format(
          "{}, and {} of the {} ranks of {} cannot use it: {}. Force a route that all of them can use ({}), or no "
          "route",
          forced, ranks.size(), list.size(), who, each_words(group, ranks, words, ": ", shown), names_of(facts.routes));
    case NoRouteReason::unreachable:
      return fmt::format(
          "no route reaches all {} ranks of {}: {}. Set workspace.path to a directory that all of them see",
          list.size(), who, each_words(group, ranks, words, ": ", shown));
    case NoRouteReason::unfit: {
      std::string text;
      for (const int rank : ranks)
        text += fmt::format("{}rank {} can use: {}", text.empty() ? "" : "; ", group.info(rank).global_rank,
                            names_of(records[static_cast<std::size_t>(rank)].routes));
      return fmt::format(
          "the ranks of {} can reach each other by different routes, and have only {} in common ({}). Force that route "
          "on all of them",
          who, in_quotes(to_string(refused.route)), text);
    }
  }
  return "the ranks have no route";
}

ErrorKind kind_of(NoRouteReason refusal) noexcept {
  return refusal == NoRouteReason::mixed ? ErrorKind::invalid_argument : ErrorKind::unsupported;
}

namespace {

// Size of the whole window: large enough to keep a network link busy, and no more than a few tensors of many senders.
constexpr std::uint64_t window = 64 << 20;
constexpr std::uint64_t largest_piece = 4 << 20;
constexpr std::uint64_t smallest_piece = 16 << 10;

/// All ranks must compute the same numbers, whatever the page size of their host is.
constexpr std::uint64_t page_bytes = 4096;
static_assert(shm::header_bytes == page_bytes);

std::uint64_t in_pages(std::uint64_t bytes) noexcept {
  return os::whole_pages(bytes, page_bytes);
}

std::uint64_t plus(std::uint64_t a, std::uint64_t b) {
  return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

/// Returns the memory that a merge needs: its result and the window.
std::uint64_t merged_bytes(const ExchangeRecord& first, const std::vector<int>& members, const Records& records) {
  std::uint64_t sum = 0;
  std::uint64_t largest = 0;
  for (const int member : members) {
    const std::uint64_t bytes = records[static_cast<std::size_t>(member)].moving_bytes;
    sum = plus(sum, bytes);
    largest = std::max(largest, bytes);
  }
  const std::uint64_t target = merge_reduces(first.merge) ? first.moving_bytes : sum;
  return plus(in_pages(target), merge_window_bytes(members.size() - 1, largest));
}

}  // namespace

std::uint64_t merge_piece_bytes(std::size_t senders, std::uint64_t largest) noexcept {
  const std::uint64_t share = std::bit_floor(window / 2 / std::max<std::uint64_t>(senders, 1));
  return std::min(std::clamp(share, smallest_piece, largest_piece), in_pages(largest));
}

std::uint64_t merge_window_bytes(std::size_t senders, std::uint64_t largest) noexcept {
  return 2 * senders * merge_piece_bytes(senders, largest);
}

std::uint64_t fresh_bytes_of(int rank, const std::vector<int>& members, const Records& records, const Group& group) {
  const ExchangeRecord& own = records[static_cast<std::size_t>(rank)];
  if (!own.receives)
    return own.operation == GatherKind::merge ? merge_fresh_bytes(rank, members, records) : own.fresh_bytes;
  std::uint64_t needed = 0;
  if (own.operation == GatherKind::merge) {
    needed = merged_bytes(own, members, records);
  } else {
    for (const int member : members) {
      const bool is_far = is_between_hosts(own.forced) || group.host_of(member) != group.host_of(rank);
      if (member != rank && is_far)
        needed = plus(needed, in_pages(records[static_cast<std::size_t>(member)].moving_bytes));
    }
  }
  return needed - std::min(needed, own.free);
}

namespace {

std::uint64_t senders_of(std::uint32_t length) {
  return std::max<std::uint32_t>(length, 2) - 1;
}

std::uint64_t least_budget(std::uint32_t length, std::uint32_t depth) {
  return (shm::header_bytes + page_bytes) * depth * senders_of(length);
}

/// The budget of one list, and the memory that it would have to take.
struct ListNeed {
  int host = 0;
  std::uint64_t budget = 0;
  std::uint64_t held = 0;
  std::uint64_t least = 0;
  [[nodiscard]] std::uint64_t fresh() const { return budget - std::min(budget, held); }
};

struct HostRoom {
  double fresh = 0;  // sum over all lists; it may exceed 64 bits
  std::uint64_t available = UINT64_MAX;
  os::MemoryLimit limit = os::MemoryLimit::machine;
};

}  // namespace

StreamShare share_of(std::uint64_t budget, std::uint32_t length, std::uint32_t depth) {
  if (budget < least_budget(length, depth))
    throw Error(
        ErrorKind::invalid_argument,
        fmt::format(
            "memory_budget of {} is too small for {} senders with a pipeline_depth of {}: at least {} are needed",
            byte_text(budget), senders_of(length), depth, byte_text(least_budget(length, depth))));
  StreamShare share;
  share.budget = budget / senders_of(length);
  share.part_bytes = share.budget / depth / page_bytes * page_bytes - shm::header_bytes;
  // Sizes of tensors are counted in 63 bits, and so is the size of a part.
  share.part_bytes = std::min<std::uint64_t>(share.part_bytes, INT64_MAX / page_bytes * page_bytes);
  return share;
}

StreamShare agree_on_share(const ExchangeRecord& mine, const Records& records,
                           const std::function<int(int rank)>& host_of) {
  std::map<std::uint64_t, ListNeed> lists;
  std::map<int, HostRoom> hosts;
  for (std::size_t i = 0; const ExchangeRecord& record : records) {
    const int rank = records.rank_at(i++);
    if (record.list_length < 2) continue;
    const int host = host_of(rank);
    ListNeed& list = lists[record.list_hash];
    list.budget = record.budget;
    list.least = least_budget(record.list_length, static_cast<std::uint32_t>(record.depth));
    list.held += record.pooled;
    if (record.position == 0) list.host = host;
    HostRoom& room = hosts[host];
    if (record.available_bytes < room.available) {
      room.available = record.available_bytes;
      room.limit = record.limit;
    }
  }
  for (const auto& [hash, list] : lists) hosts[list.host].fresh += static_cast<double>(list.fresh());
  const auto granted = [&](const ListNeed& list) {
    const HostRoom& room = hosts[list.host];
    const auto available = static_cast<double>(room.available);
    if (room.fresh <= available) return list.budget;
    return std::min(list.budget, list.held) +
           static_cast<std::uint64_t>(available * (static_cast<double>(list.fresh()) / room.fresh));
  };
  for (const auto& [hash, list] : lists)
    if (granted(list) < list.least)
      throw Error(ErrorKind::out_of_space,
                  fmt::format("too little shared memory: a list of ranks needs at least {}, but its share of the {} "
                              "available ({}) is {}. Give the job more memory",
                              byte_text(list.least), byte_text(hosts[list.host].available),
                              os::to_string(hosts[list.host].limit), byte_text(granted(list))));
  if (mine.list_length == 0) return {};
  if (mine.list_length == 1) return share_of(mine.budget, mine.list_length, static_cast<std::uint32_t>(mine.depth));
  const ListNeed& list = lists.at(mine.list_hash);
  StreamShare share = share_of(granted(list), mine.list_length, static_cast<std::uint32_t>(mine.depth));
  share.is_cut = granted(list) < list.budget;
  return share;
}

}  // namespace muster::gather
