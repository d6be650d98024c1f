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

/// The first rank copies so much of its own before round 1, which then can be the only one.
constexpr std::uint64_t copied_early = 1 << 20;

std::uint64_t nanoseconds(Clock::time_point time) {
  return static_cast<std::uint64_t>(time.time_since_epoch().count());
}

/// Times one phase after another.
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
  trace::Parts parts_;
};

TensorSpec spec_of(const Tensor& tensor) {
  return {tensor.dtype(), tensor.shape()};
}
TensorSpec spec_of(const Config& value) {
  return spec_of(value.as_tensor());
}

/// Throws Error(argument) if `into` is not so many tensors that take what the results are.
void check_into(std::span<const Tensor> into, std::size_t results, const TensorSpec& what) {
  if (into.size() != results)
    throw Error(ErrorKind::argument, fmt::format("into has {} tensors for {} results", into.size(), results));
  for (std::size_t i = 0; i < into.size(); ++i) {
    const Tensor& target = into[i];
    if (spec_of(target) != what)
      throw Error(ErrorKind::argument, fmt::format("into: tensor {} is {}, and the result is {}", i,
                                                   to_string(spec_of(target)), to_string(what)));
    const bool is_there = target.is_writable() || target.nbytes() == 0;
    if (!is_there || !target.view().is_contiguous() || !target.device().is_host())
      throw Error(ErrorKind::argument, fmt::format("into: tensor {} must be writable, contiguous and on the host", i));
  }
}

Config copied(const Config& value) {
  return with_leaves(value, [](const Config& leaf) -> Config {
    return leaf.is_tensor() ? Tensor::copy_of(leaf.as_tensor().view()) : leaf;
  });
}

/// The exchange of one rank.
class ExchangeRun {
 public:
  ExchangeRun(Operation operation, const Config* value, std::span<const int> ranks, SyncGroup& group,
              const GatherOptions& options, const Merge* merge)
      : ranks_(ranks), group_(group), options_(options) {
    call_.merge = merge;
    call_.operation = operation;
    call_.value = value;
    call_.group = &sync::inside(group);
    call_.options = &options;
    call_.number = call_.group->call_number();
  }

  void refuse(const Error* failure) noexcept { refusal_ = failure; }

  Outcome operator()(trace::Span& span) {
    Phases phases(state_->report, span);
    const std::optional<Error> failure = attempt(group_, [&] { prepare(); });
    if (failure) {
      record_ = Record{};
      record_.status = status_of(failure->kind());
    }
    // What is small and warm has been written already.
    const std::uint64_t written = record_.complete ? record_.moving_bytes : 0;
    phases.end("prepare", written, written == 0 ? 0 : 1);
    const std::vector<Record> records = opening_round(call_, record_, failure, ranks_, "gather: round 1",
                                                      "gather: failing", [&](auto reason) { return words(reason); });
    phases.end("round 1");
    ExchangeReport& report = state_->report;
    report.rounds += 1 + run_preflights(call_, records, preflight_.get());
    // The others wait for what this rank would have begun here.
    if (const auto stuck = attempt(group_, [&] { choose(records); }))
      sync::fail(group_, sync::in_own_name(group_, *stuck));
    // A call of the kernel each time: not made if all has been written already.
    const auto faults_now = [&] { return needs_closing(records) ? os::thread_page_faults() : 0; };
    const std::uint64_t faults = faults_now();
    const std::optional<Error> trouble = attempt(group_, [&] {
      if (!call_.is_member()) return;
      transfer_->move(records, report);
      // The others have what they waited for.
      if (receives_into() && call_.merge != nullptr)
        check_into(options_.into, 1, merge_layout(*call_.merge, spec_of(*call_.value), call_.list, records).target);
      if (copies_own_ && record_.payload_bytes > copied_early) own_ = copied(*call_.value);
    });
    std::uint64_t in_list = 0;
    for (const int rank : call_.list) in_list += records[static_cast<std::size_t>(rank)].payload_bytes;
    const bool is_merge = call_.operation == Operation::merge;
    const std::uint64_t moved = call_.is_sender() || is_merge ? record_.moving_bytes - written : 0;
    const bool by_network = report.network_bytes != 0;
    // What a network sends is not copied here.
    phases.end(is_merge             ? "merge"
               : !call_.is_sender() ? "receive"
               : by_network         ? "send"
                                    : "copy",
               moved, moved == 0 || by_network ? 0 : 1, faults_now() - faults);
    Outcome outcome{call_.list, {}, state_};
    const bool is_closed = close(records, trouble);
    // At once: who does not publish takes away what others have by now.
    if (transfer_) transfer_->commit();
    if (is_closed) phases.end("round 2");
    report.payload_bytes = in_list;
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
    if (call_.operation != Operation::configs) {
      const TensorSpec spec = spec_of(*call_.value);
      const std::string kind = call_.merge == nullptr ? to_string(spec) : merge_kind(*call_.merge, spec);
      record_.kind_hash = XXH3_64bits(kind.data(), kind.size());
    }
    // Its own tree does not travel, but what is wrong with it is wrong on every rank alike.
    if (call_.is_first() && call_.value != nullptr)
      core::encode_descriptor(*call_.value, [&](const Tensor& tensor) {
        record_.payload_bytes += tensor.nbytes();
        return std::optional(core::Place{});
      });
    if (receives_into()) {
      if (call_.operation == Operation::configs) throw Error(ErrorKind::argument, "into takes tensors, not configs");
      if (options_.devices.landing != Landing::host)
        throw Error(ErrorKind::argument, "into takes tensors of the host, and these are to land on a device");
      // What a merge makes is known after round 1.
      if (call_.merge == nullptr)
        check_into(options_.into, call_.list.size(), spec_of(*call_.value));
      else
        record_.closes = true;
    }
    if (call_.value != nullptr) record_.residency = residency_of(*call_.value);
    // If there is none, it is refused after round 1, in words that all ranks have.
    guess_ = guess_route(record_);
    if (guess_ == nullptr) return;
    preflight_ = guess_->preflight(call_, record_);
    transfer_ = begin_transfer(*guess_, call_);
    transfer_->offer(record_);
    // A merge, a gather to a device and the caller's tensors are copies already.
    copies_own_ = call_.is_first() && call_.value != nullptr && call_.merge == nullptr && options_.own == Own::copy &&
                  !receives_into() && (record_.residency | Residency::host) == Residency::host;
    if (!copies_own_) return;
    // A large copy is made while the senders are busy, too: that there is no memory for it is told in round 2.
    if (record_.payload_bytes > copied_early)
      record_.closes = true;
    else
      own_ = copied(*call_.value);
  }

  [[nodiscard]] bool receives_into() const { return call_.is_first() && !options_.into.empty(); }

  /// Entries become the caller's tensors, and what they were views of is free.
  void fill(std::vector<std::optional<Config>>& entries) {
    for (std::size_t i = 0; i < options_.into.size(); ++i) {
      const Tensor& target = options_.into[i];
      if (target.nbytes() != 0) copy_contiguous(entries[i]->as_tensor().view(), target.mutable_data());
      entries[i] = target;
    }
  }

  /// The route of the list, on its members. A rank that had guessed another one has no tensors (record.cpp refuses
  /// all else), and begins now.
  void choose(std::span<const Record> records) {
    if (!call_.is_member()) return;
    Chosen chosen = chosen_route(call_, records);
    state_->report.route = chosen.driver->route();
    state_->report.reason = std::move(chosen.reason);
    if (chosen.driver == guess_) return;
    preflight_.reset();
    Record known = record_;
    transfer_ = begin_transfer(*chosen.driver, call_);
    transfer_->offer(known);
  }

  /// For a problem.
  [[nodiscard]] std::string words(Problem::Reason reason) const {
    if (call_.value == nullptr) return {};
    if (reason == Problem::Reason::contents) return content_text(record_);
    if (reason != Problem::Reason::kinds) return {};
    const TensorSpec spec = spec_of(*call_.value);
    return call_.merge == nullptr ? to_string(spec) : merge_text(*call_.merge, spec);
  }

  /// Whether there was a second round.
  bool close(std::span<const Record> records, const std::optional<Error>& trouble) {
    if (!needs_closing(records)) {
      if (!trouble) return false;
      // The others are gone already, and hear of it at their next call.
      sync::fail(group_, sync::in_own_name(group_, *trouble));
    }
    ++state_->report.rounds;
    // Before a sender can begin again: what this rank has taken is free.
    closing_round(call_, trouble, "gather: round 2", "gather: failing", [&] { transfer_.reset(); });
    return true;
  }

  std::span<const int> ranks_;
  SyncGroup& group_;
  const GatherOptions& options_;
  Call call_;
  Record record_;
  const RouteDriver* guess_ = nullptr;  // what was prepared for before round 1
  std::unique_ptr<Preflight> preflight_;
  std::unique_ptr<Transfer> transfer_;
  bool copies_own_ = false;
  Config own_;                      // the copy
  const Error* refusal_ = nullptr;  // what this rank cannot go on for, if it cannot from the start
  std::shared_ptr<detail::ExchangeState> state_ = std::make_shared<detail::ExchangeState>();
};

}  // namespace

Outcome exchange(Operation operation, const Config* value, std::span<const int> ranks, SyncGroup& group,
                 const GatherOptions& options, const Merge* merge, const Error* refusal) {
  trace::Span span(trace::Kind::exchange, to_string(operation), sync::inside(group).operations().next());
  ExchangeRun run(operation, value, ranks, group, options, merge);
  run.refuse(refusal);
  // While it still lends: a first rank that is about to take a lease has to hear of the failure before that is
  // withdrawn.
  Outcome outcome = sync::unless_out_of_memory(group, [&] { return run(span); });
  if (log_enabled(LogLevel::debug)) {
    const ExchangeReport& report = outcome.state->report;
    log(LogLevel::debug, fmt::format("rank {}: {}: {} bytes by {} ({})", group.rank(), to_string(operation),
                                     report.payload_bytes, to_string(report.route), report.reason));
  }
  return outcome;
}

void refuse(Operation operation, const Error& failure, const RankList& ranks, SyncGroup& group,
            const GatherOptions& options) {
  collectively(group, operation,
               [&] { exchange(operation, nullptr, ranks.in(group), group, options, nullptr, &failure); });
  throw Error(failure);
}

}  // namespace muster::gather
