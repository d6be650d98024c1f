// SPDX-License-Identifier: Apache-2.0
#include "src/gather/exchange.hpp"

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>

#include "muster/log.hpp"
#include "src/core/descriptor.hpp"
#include "src/gather/merge_record.hpp"
#include "src/gather/opening.hpp"
#include "src/os/process.hpp"
#include "src/trace/span.hpp"

namespace muster::gather {
namespace {

using Clock = std::chrono::steady_clock;

/// The root copies up to this many bytes of its own value before round 1, so that round 1 can be the only round.
constexpr std::uint64_t copied_early = 1 << 20;

std::uint64_t nanoseconds(Clock::time_point time) {
  return static_cast<std::uint64_t>(time.time_since_epoch().count());
}

/// Times consecutive phases.
class Phases {
 public:
  Phases(ExchangeReport& report, const trace::Span& span) : report_(report), parts_(span, nanoseconds(begin_)) {}
  void end(const char* name, std::uint64_t bytes = 0, std::uint64_t copies = 0, std::uint64_t page_faults = 0) {
    const Clock::time_point now = Clock::now();
    report_.phases.push_back({name, std::chrono::duration<double>(now - begin_).count(), bytes, copies, page_faults});
    parts_.end(name, nanoseconds(now), bytes, copies, page_faults);
    begin_ = now;
  }

 private:
  ExchangeReport& report_;
  Clock::time_point begin_ = Clock::now();
  trace::OperationParts parts_;
};

TensorSpec spec_of(const Tensor& tensor) {
  return {tensor.dtype(), tensor.shape()};
}
TensorSpec spec_of(const Config& value) {
  return spec_of(value.as_tensor());
}

/// Throws Error(invalid_argument) unless `into` has `results` tensors that can receive results of this dtype and shape.
void check_into(std::span<const Tensor> into, std::size_t results, const TensorSpec& what) {
  if (into.size() != results)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("into: expected {} tensors, received {}", results, into.size()));
  for (std::size_t i = 0; i < into.size(); ++i) {
    const Tensor& target = into[i];
    if (spec_of(target) != what)
      throw Error(ErrorKind::invalid_argument, fmt::format("into: tensor {} is {}, but the result is {}", i,
                                                           to_string(spec_of(target)), to_string(what)));
    const bool is_there = target.is_writable() || target.nbytes() == 0;
    if (!is_there || !target.view().is_contiguous() || !target.device().is_host())
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("into: tensor {} must be writable, contiguous and on the host", i));
  }
}

Config copied(const Config& value) {
  return map_leaves(value, [](const Config& leaf) -> Config {
    return leaf.is_tensor() ? Tensor::copy_of(leaf.as_tensor().view()) : leaf;
  });
}

/// The exchange on one rank.
class ExchangeRun {
 public:
  ExchangeRun(GatherKind operation, const Config* value, std::span<const int> ranks, Group& group,
              const GatherOptions& options, const Merge* merge)
      : ranks_(ranks), group_(group), options_(options) {
    call_.merge = merge;
    call_.operation = operation;
    call_.value = value;
    call_.group = &group::inside(group);
    call_.options = &options;
    call_.number = call_.group->call_number();
  }

  void refuse(const Error* failure) noexcept { refusal_ = failure; }

  Outcome operator()(trace::Span& span) {
    Phases phases(state_->report, span);
    const std::optional<Error> failure = attempt(group_, [&] { prepare(); });
    if (failure) {
      record_ = ExchangeRecord{};
      record_.status = status_of(failure->kind());
    }
    // Small payloads with a warm slot have been written already.
    const std::uint64_t written = record_.complete ? record_.moving_bytes : 0;
    phases.end("prepare", written, written == 0 ? 0 : 1);
    const Opening opening = opening_round(call_, record_, failure, ranks_, "gather: round 1", "gather: failing",
                                          [&](auto reason) { return words(reason); });
    phases.end("round 1");
    ExchangeReport& report = state_->report;
    report.rounds += 1 + run_preflights(call_, opening, preflight_.get());
    // If this fails, the group fails, because other ranks wait for data that this rank would now send.
    if (const auto stuck = attempt(group_, [&] { choose(opening); }))
      group::fail(group_, group::in_own_name(group_, *stuck));
    // This costs a system call, so it is skipped if all data was written before round 1.
    const auto faults_now = [&] { return opening.closes ? os::thread_page_faults() : 0; };
    const std::uint64_t faults = faults_now();
    const std::optional<Error> trouble = attempt(group_, [&] {
      if (!call_.is_member()) return;
      transfer_->move(opening.records, report);
      // The other ranks have received their data, so a failure from here on cannot make them wait.
      if (receives_into() && call_.merge != nullptr)
        check_into(options_.into, 1,
                   merge_layout(*call_.merge, spec_of(*call_.value), call_.list, opening.records).target);
      if (copies_own_ && record_.payload_bytes > copied_early) own_ = copied(*call_.value);
    });
    const bool is_merge = call_.operation == GatherKind::merge;
    const std::uint64_t moved = call_.is_sender() || is_merge ? record_.moving_bytes - written : 0;
    const bool by_network = report.network_bytes != 0;
    // Data that is sent over a network is not copied here.
    phases.end(is_merge             ? "merge"
               : !call_.is_sender() ? "receive"
               : by_network         ? "send"
                                    : "copy",
               moved, moved == 0 || by_network ? 0 : 1, faults_now() - faults);
    Outcome outcome{call_.list, {}, state_};
    const bool is_closed = close(opening.closes, trouble);
    // Commit immediately: a transfer that is destroyed without commit() withdraws data that other ranks already use.
    if (transfer_) transfer_->commit();
    if (is_closed) phases.end("round 2");
    report.payload_bytes = opening.payload_bytes;
    span.add_bytes(record_.payload_bytes);
    span.set_route(to_string(report.route));
    if (transfer_) {
      if (call_.is_first()) {
        outcome.entries = transfer_->deliver();
        if (call_.value != nullptr && !outcome.entries.front())
          outcome.entries.front() = copies_own_ ? std::move(own_) : Config(*call_.value);
        if (receives_into()) fill(outcome.entries);
      }
      state_->obligations = transfer_->obligations();
      report.pool_bytes = transfer_->pool_bytes();
    }
    phases.end("deliver");
    return outcome;
  }

 private:
  void prepare() {
    if (refusal_ != nullptr) throw Error(*refusal_);
    // A rank that is in no list only takes part in the rounds.
    if (!enter_list(ranks_, options_, call_, record_)) {
      call_.value = nullptr;
      return;
    }
    record_.has_value = call_.value != nullptr;
    if (call_.operation != GatherKind::configs) {
      const TensorSpec spec = spec_of(*call_.value);
      const std::string kind = call_.merge == nullptr ? to_string(spec) : merge_kind(*call_.merge, spec);
      record_.kind_hash = XXH3_64bits(kind.data(), kind.size());
    }
    // The root's own value is not sent. It is encoded anyway, so that an invalid tree fails on every rank in the same
    // way.
    if (call_.is_first() && call_.value != nullptr)
      core::encode_descriptor(*call_.value, [&](const Tensor& tensor) {
        record_.payload_bytes += tensor.nbytes();
        return std::optional(core::TensorLocation{});
      });
    if (receives_into()) {
      if (call_.operation == GatherKind::configs)
        throw Error(ErrorKind::invalid_argument, "into: only gathers of tensors can use it, not gathers of configs");
      if (options_.devices.destination != Destination::host)
        throw Error(ErrorKind::invalid_argument,
                    "into: its tensors must be on the host, but the destination is a device");
      // The shape of a merge result is known after round 1.
      if (call_.merge == nullptr)
        check_into(options_.into, call_.list.size(), spec_of(*call_.value));
      else
        record_.closes = true;
    }
    if (call_.value != nullptr) record_.residency = residency_of(*call_.value);
    // If there is no route, the policy refuses the call after round 1, with a message that all ranks have.
    guess_ = guess_route(record_);
    if (guess_ == nullptr) return;
    preflight_ = guess_->preflight(call_, record_);
    transfer_ = begin_transfer(*guess_, call_);
    transfer_->offer(record_);
    // Merges, gathers to a device and results in the caller's tensors already copy the root's value.
    copies_own_ = call_.is_first() && call_.value != nullptr && call_.merge == nullptr &&
                  options_.root_tensors == RootTensors::copy && !receives_into() &&
                  (record_.residency | Residency::host) == Residency::host;
    if (!copies_own_) return;
    // A large copy is made while the senders are busy. If memory is short, round 2 reports it.
    if (record_.payload_bytes > copied_early)
      record_.closes = true;
    else
      own_ = copied(*call_.value);
  }

  [[nodiscard]] bool receives_into() const { return call_.is_first() && !options_.into.empty(); }

  /// Copies the entries into the caller's tensors, which frees the memory that the entries viewed.
  void fill(std::vector<std::optional<Config>>& entries) {
    for (std::size_t i = 0; i < options_.into.size(); ++i) {
      const Tensor& target = options_.into[i];
      if (target.nbytes() != 0) copy_contiguous(entries[i]->as_tensor().view(), target.mutable_data());
      entries[i] = target;
    }
  }

  /// Selects the route of the list, on its members. A rank whose guess was different has no tensors (record.cpp refuses
  /// all other cases), and begins the transfer now.
  void choose(const Opening& opening) {
    if (!call_.is_member()) return;
    Chosen chosen = chosen_route(call_, opening);
    state_->report.route = chosen.driver->route();
    state_->report.reason = std::move(chosen.reason);
    if (chosen.driver == guess_) return;
    preflight_.reset();
    ExchangeRecord known = record_;
    transfer_ = begin_transfer(*chosen.driver, call_);
    transfer_->offer(known);
  }

  /// Returns this rank's text for the message of a problem.
  [[nodiscard]] std::string words(Problem::Reason reason) const {
    if (call_.value == nullptr) return {};
    if (reason == Problem::Reason::contents) return content_text(record_);
    if (reason != Problem::Reason::kinds) return {};
    const TensorSpec spec = spec_of(*call_.value);
    return call_.merge == nullptr ? to_string(spec) : merge_text(*call_.merge, spec);
  }

  /// Runs round 2 if one is needed; returns whether it did.
  bool close(bool is_needed, const std::optional<Error>& trouble) {
    if (!is_needed) {
      if (!trouble) return false;
      // The other ranks have already returned. They receive this error at their next call.
      group::fail(group_, group::in_own_name(group_, *trouble));
    }
    ++state_->report.rounds;
    // Before a sender can begin its next exchange, the leases of this rank are returned.
    closing_round(call_, trouble, "gather: round 2", "gather: failing", [&] { transfer_.reset(); });
    return true;
  }

  std::span<const int> ranks_;
  Group& group_;
  const GatherOptions& options_;
  GatherCall call_;
  ExchangeRecord record_;
  const RouteDriver* guess_ = nullptr;  // the route that was prepared before round 1
  std::unique_ptr<Preflight> preflight_;
  std::unique_ptr<Transfer> transfer_;
  bool copies_own_ = false;
  Config own_;                      // copy of the root's value
  const Error* refusal_ = nullptr;  // the reason why this rank cannot take part from the start, or null
  std::shared_ptr<detail::ExchangeState> state_ = std::make_shared<detail::ExchangeState>();
};

}  // namespace

Outcome exchange(GatherKind operation, const Config* value, std::span<const int> ranks, Group& group,
                 const GatherOptions& options, const Merge* merge, const Error* refusal) {
  trace::Span span(trace::SpanKind::exchange, to_string(operation), group::inside(group).operations().next());
  ExchangeRun run(operation, value, ranks, group, options, merge);
  run.refuse(refusal);
  // This runs before the leases are withdrawn: a root that is about to take a lease must first learn of the failure.
  Outcome outcome = group::unless_out_of_memory(group, [&] { return run(span); });
  if (log_enabled(LogLevel::debug)) {
    const ExchangeReport& report = outcome.state->report;
    log(LogLevel::debug, fmt::format("rank {}: {}: {} bytes by {} ({})", group.rank(), to_string(operation),
                                     report.payload_bytes, to_string(report.route), report.reason));
  }
  return outcome;
}

void refuse(GatherKind operation, const Error& failure, const RankList& ranks, Group& group,
            const GatherOptions& options) {
  collectively(group, operation,
               [&] { exchange(operation, nullptr, ranks.in(group), group, options, nullptr, &failure); });
  throw Error(failure);
}

}  // namespace muster::gather
