// SPDX-License-Identifier: Apache-2.0
// The stream on every rank: opening, companion, failure, closing. Step numbers are those of stream.hpp.

#include "src/gather/stream.hpp"

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <exception>
#include <thread>

#include "muster/log.hpp"
#include "src/base/message.hpp"
#include "src/gather/opening.hpp"
#include "src/gather/policy.hpp"
#include "src/group/group.hpp"
#include "src/group/watchdog.hpp"

namespace muster::gather {
namespace {

using Clock = std::chrono::steady_clock;

/// The error kind with which a rank fails the companion after its own work has failed. The closing round delivers the
/// error text. No wait fails with this kind by itself.
constexpr ErrorKind announced = ErrorKind::rank_mismatch;

constexpr std::chrono::milliseconds between_looks{20};

bool has_device_tensors(const Config& config) {
  return (residency_of(config) | Residency::host) == Residency::mixed;
}

constexpr std::uint64_t set_up_bytes = 320 << 10;  // per rank, at most

/// The state that a group keeps for its streams.
struct StreamState {
  std::shared_ptr<group::BaseGroup> companion;  // null before the first stream and after a failed one; may have failed
  std::uint64_t part_bytes = 0;                 // part size of the last stream, and the size of its slots
};
std::shared_ptr<StreamState> stream_state_of(Group& group) {
  return group::inside(group).extension<StreamState>();
}

/// The stream on one rank.
class StreamRun {
 public:
  StreamRun(const LayerSource& source, std::span<const int> ranks, Group& group, const LayerConsumer& consume,
            const StreamOptions& options)
      : ranks_(ranks), group_(group::inside(group)), options_(options), state_(stream_state_of(group)) {
    call_.source = &source;
    call_.consume = &consume;
    call_.entry.operation = GatherKind::stream;
    call_.entry.group = &group::inside(group);
    call_.entry.number = group_.call_number();
    call_.entry.options = &call_.part_options;
    call_.report = &report_;
    call_.part_options.route = options.route;
    call_.part_options.timeout = group::timeout_of(options.timeout, group.timeout());
    call_.part_options.stop = options.stop;
    call_.part_options.pipeline_depth = options.pipeline_depth;
    call_.part_options.workspace.path = options.workspace.path;
    call_.part_options.workspace.zstd_level = options.workspace.zstd_level;
    call_.part_options.debug = options.debug;
  }

  StreamReport operator()() {
    const Clock::time_point begin = Clock::now();
    trace::Span span(trace::SpanKind::stream, to_string(GatherKind::stream), group_.operations().next());
    call_.span = &span;
    open();
    set_up();
    try {
      close(stream());
    } catch (...) {
      // These objects use the companion.
      part_sender_.reset();
      part_receiver_.reset();
      if (sending_) sending_->withdraw();
      sending_.reset();
      // All ranks drop the companion: it may contain messages of this stream, and slots that are never returned.
      state_->companion.reset();
      throw;
    }
    report_.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    if (call_.entry.is_sender()) span.add_bytes(report_.bytes);
    span.set_route(to_string(report_.route));
    return std::move(report_);
  }

 private:
  void open() {
    const trace::Span span(trace::SpanKind::phase, "opening");
    // The companion may have failed after its last stream, in a wait that returned credit of messages.
    if (state_->companion && state_->companion->error()) state_->companion.reset();
    const std::optional<Error> failure = attempt(group_, [&] { prepare(); });
    if (failure) {
      record_ = ExchangeRecord{};
      record_.operation = GatherKind::stream;
      record_.status = status_of(failure->kind());
    }
    record_.needs_companion = state_->companion == nullptr;
    const auto words = [&](Problem::Reason reason) {
      if (reason != Problem::Reason::kinds) return std::string();
      return fmt::format("memory_budget {}, pipeline_depth {}", options_.memory_budget, options_.pipeline_depth);
    };
    const Opening opening =
        opening_round(call_.entry, record_, failure, ranks_, "gather_each: opening", "gather_each: failing", words);
    if (call_.entry.is_member()) {
      // A stream prepares nothing for a route before the route is known.
      Chosen chosen = chosen_route(call_.entry, opening);
      call_.driver = chosen.driver;
      report_.route = chosen.driver->route();
      report_.reason = std::move(chosen.reason);
    }
    if (opening.needs_companion) state_->companion.reset();
    report_.rounds += 1 + run_preflights(call_.entry, opening, preflight_.get());
    const StreamShare share =
        agree_on_share(record_, opening.records, [this](int rank) { return group_.host_of(rank); });
    if (!call_.entry.is_member()) return;
    call_.part_bytes = share.part_bytes;
    call_.part_options.memory_budget = share.budget;
    report_.part_bytes = share.part_bytes;
    if (share.is_cut && call_.entry.is_first())
      log(LogLevel::warning,
          fmt::format("gather_each: less shared memory is available than the budget of {}: each sender has {}",
                      byte_text(options_.memory_budget), byte_text(share.budget)));
  }

  void prepare() {
    record_.operation = GatherKind::stream;
    if (!enter_list(ranks_, call_.part_options, call_.entry, record_)) return;
    if (!*call_.source) throw Error(ErrorKind::invalid_argument, "a member of the list must pass a source");
    if (call_.entry.is_first() && !*call_.consume)
      throw Error(ErrorKind::invalid_argument, "the root of the list must pass a consumer");
    record_.budget = options_.memory_budget;
    record_.depth = static_cast<std::uint64_t>(options_.pipeline_depth);
    (void)share_of(options_.memory_budget, record_.list_length, static_cast<std::uint32_t>(options_.pipeline_depth));
    const std::array<std::uint64_t, 2> kind = {record_.budget, record_.depth};
    record_.kind_hash = XXH3_64bits(kind.data(), sizeof kind);
    const os::MemoryHeadroom room = os::memory_headroom(os::default_backing());
    record_.available_bytes = room.bytes;
    // Creating the companion takes some of this memory, for the messages of each rank on this host.
    if (!state_->companion)
      record_.available_bytes -=
          std::min(room.bytes, set_up_bytes * static_cast<std::uint64_t>(group::ranks_of_host(group_)));
    record_.limit = room.limit;
    // On the root, memory that it receives into counts; on other ranks, memory that they send from.
    if (state_->companion)
      for (const auto& driver : RouteTable::instance().drivers()) {
        const std::uint64_t pooled = driver->settle(*state_->companion, RouteDriver::Keep::free_memory);
        if (driver->receives_into_own() == call_.entry.is_first()) record_.pooled += pooled;
      }
    if (const RouteDriver* guess = guess_route(record_)) preflight_ = guess->preflight(call_.entry, record_);
  }

  void set_up() {
    if (!state_->companion) {
      state_->companion = group_.companion(call_.wait("gather_each: setting up"));
      report_.rounds += 2;
      state_->part_bytes = 0;
    }
    group::BaseGroup& companion = *state_->companion;
    call_.companion = &companion;
    for (int rank = 0; rank < group_.size(); ++rank)
      if (rank != group_.rank()) call_.others.push_back(companion.liveness(rank));
    if (!call_.entry.is_member() || state_->part_bytes == call_.part_bytes) return;
    // Slots of another size would count against this stream's budget.
    if (state_->part_bytes != 0)
      for (const auto& driver : RouteTable::instance().drivers()) driver->settle(companion, RouteDriver::Keep::nothing);
    state_->part_bytes = call_.part_bytes;
  }

  /// Runs steps 3 to 6. Returns this rank's own failure; throws if the group has failed.
  std::optional<Error> stream() {
    if (!call_.entry.is_member()) return std::nullopt;
    const trace::Span span(trace::SpanKind::phase, "parts");
    std::optional<Error> own;
    try {
      own = attempt(*call_.companion, [&] {
        open_ends();
        if (call_.entry.is_first())
          StreamReceiving(call_).run();
        else
          sending_.emplace(call_).run();
        settle(*call_.companion);
      });
    } catch (const CallbackFailure& failure) {
      own = failure.error;
    } catch (const Error& error) {
      // The companion has failed: another rank has announced its own failure, or a wait has failed permanently.
      const Error cause = call_.companion->error().value_or(error);
      if (cause.kind() != announced) group::fail(group_, cause);
    }
    if (own) call_.companion->abort(group::error_of(group_.info(group_.rank()), announced, own->what()));
    return own;
  }

  void open_ends() {
    part_call_ = call_.part_call(0, 0, nullptr);
    if (call_.entry.is_first())
      part_receiver_ = call_.driver->open_part_receiver(part_call_, call_.part_bytes);
    else
      part_sender_ = call_.driver->open_part_sender(part_call_);
    call_.part_receiver = part_receiver_.get();
    call_.part_sender = part_sender_.get();
  }

  /// Completes the transfers in flight. `group` is used for the waits.
  void settle(Group& group) {
    const WaitOptions wait = call_.wait("gather_each: ending");
    if (part_sender_) part_sender_->settle(group, wait);
    if (part_receiver_) part_receiver_->settle(group, wait);
    part_sender_.reset();
    part_receiver_.reset();
  }

  void close(const std::optional<Error>& own) {
    const trace::Span span(trace::SpanKind::phase, "closing");
    ++report_.rounds;
    try {
      closing_round(call_.entry, own, "gather_each: closing", "gather_each: failing");
    } catch (const Error&) {
      if (!group_.error()) settle(group_);
      throw;
    }
  }

  std::span<const int> ranks_;
  group::BaseGroup& group_;
  const StreamOptions& options_;
  std::shared_ptr<StreamState> state_;
  StreamCall call_;
  ExchangeRecord record_;
  std::unique_ptr<Preflight> preflight_;
  GatherCall part_call_;  // used by the next two members
  std::unique_ptr<PartSender> part_sender_;
  std::unique_ptr<PartReceiver> part_receiver_;
  std::optional<StreamSending> sending_;
  StreamReport report_;
};

}  // namespace

std::uint64_t trim_streams(Group& group) {
  const auto state = stream_state_of(group);
  if (!state->companion) return 0;
  std::uint64_t bytes = 0;
  for (const auto& driver : RouteTable::instance().drivers()) bytes += driver->trim(*state->companion);
  return bytes;
}

GatherCall StreamCall::part_call(std::uint64_t layer, std::uint32_t part, const Config* value) const {
  GatherCall call = entry;
  call.operation = GatherKind::configs;
  call.value = value;
  call.group = companion;
  call.number = (layer << 32) + part;
  call.is_part = true;
  return call;
}

std::optional<Config> StreamCall::next_layer(std::uint64_t layer) const {
  std::optional<Config> config;
  call_back(fmt::format("the source threw at layer {}", layer), [&] { config = (*source)(); });
  if (!config) return config;
  // The route was chosen before the residency of the tensors was known.
  call_back(fmt::format("layer {}", layer), [&] {
    refuse_asynchronous(*config);
    if (has_device_tensors(*config) && RouteTable::instance().staging() == nullptr)
      throw Error(ErrorKind::unsupported,
                  fmt::format("its tensors are on {}, and libmuster-cuda is not loaded. Link the program with it "
                              "(pkg-config muster-cuda), or copy the tensors to the host in the source",
                              places_text(*config)));
  });
  return config;
}

std::optional<Config> StreamCall::staged(const Config& part) const {
  if (!has_device_tensors(part)) return std::nullopt;
  Config there = RouteTable::instance().staging()->to_host(part, *companion, wait("gather_each: copying from devices"));
  report->peak_slot_bytes = std::max(report->peak_slot_bytes, staged_bytes());
  return there;
}

std::unique_ptr<SlotFiller> StreamCall::filler_of(const GatherCall& call) const {
  if (call.value == nullptr || residency_of(*call.value) != Residency::device) return nullptr;
  if (part_sender != nullptr || driver->route() == Route::workspace || !companion->shares_memory(call.first()))
    return nullptr;
  return RouteTable::instance().staging()->filler(call);
}

std::uint64_t StreamCall::staged_bytes() const {
  const HostStaging* const staging = RouteTable::instance().staging();
  return staging == nullptr ? 0 : staging->bytes(*companion);
}

void StreamCall::call_back(const std::string& what, const std::function<void()>& run) const {
  companion->progress();
  try {
    run();
  } catch (const Error& error) {
    throw CallbackFailure{error.with_context(what)};
  } catch (const std::bad_alloc&) {
    throw CallbackFailure{Error(ErrorKind::out_of_space, what + ": out of memory")};
  } catch (const std::exception& error) {
    throw CallbackFailure{Error(ErrorKind::io, what + ": " + error.what())};
  } catch (...) {
    throw CallbackFailure{Error(ErrorKind::io, what + ": an exception without a message")};
  }
  companion->progress();
}

void StreamCall::check() const {
  bool is_well = !part_options.stop.stop_requested() && !companion->error();
  // Checking all other ranks costs one system call each, and parts may be many and small.
  const Clock::time_point now = Clock::now();
  if (is_well && now - looked >= between_looks) {
    is_well = std::ranges::none_of(others, [](const auto& other) { return other->is_dead(); });
    looked = now;
  }
  if (is_well) return;
  // The wait throws the right error for each of these cases.
  const auto never = [] { return false; };
  companion->wait_until(
      never, [](std::chrono::nanoseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }, {},
      wait("gather_each"));
}

}  // namespace muster::gather

namespace muster {

StreamReport gather_each(const LayerSource& source, const RankList& ranks, Group& group, const LayerConsumer& consume,
                         const StreamOptions& options) {
  return gather::collectively(group, gather::GatherKind::stream, [&] {
    StreamReport report = gather::StreamRun(source, ranks.in(group), group, consume, options)();
    if (log_enabled(LogLevel::debug))
      log(LogLevel::debug,
          fmt::format("rank {}: gather_each: {} layers in {} parts, {} bytes by {} ({}), waited {:.3f} of "
                      "{:.3f} s",
                      group.rank(), report.layers, report.parts, report.bytes, to_string(report.route), report.reason,
                      report.seconds_waiting, report.seconds));
    return report;
  });
}

}  // namespace muster
