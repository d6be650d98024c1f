// SPDX-License-Identifier: Apache-2.0
// The side of rank 0. Step numbers refer to the list in session.hpp.
#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <thread>
#include <utility>

#include "muster/version.hpp"
#include "src/base/rare_log.hpp"
#include "src/rendezvous/session_side.hpp"

namespace muster::rendezvous {
namespace {

using namespace std::chrono_literals;

// A rank whose connection broke before it sent its part may connect again within this time.
constexpr milliseconds longest_return = 600ms;

class Root final : public Session::Side {
 public:
  Root(Terms terms, std::unique_ptr<Connector> transport) : Side(std::move(terms), std::move(transport)) {
    ranks_.resize(static_cast<std::size_t>(terms_.size));
    token_ = transport_->open();
  }

  void watch() override {
    if (cause_) throw *cause_;
    try {
      wait(milliseconds(0));
      for (Visitor& visitor : visitors_) hear(visitor);
      check_lost();
    } catch (const Error& cause) {
      fail(named(cause));
      throw Error(*cause_);
    }
  }

  std::vector<Member> round(const Session::Prepare& prepare, Clock::time_point deadline) override {
    begin_ = Clock::now();
    deadline_ = deadline;
    try {
      try {
        own_part_ = prepare();
      } catch (const Error& cause) {
        throw own_failure(cause);
      }
      collect();
      distribute();
      return std::exchange(members_, {});
    } catch (const Error& cause) {
      fail(named(cause));
      throw Error(*cause_);
    } catch (const std::exception& cause) {
      const Error failure = own_failure(Error(ErrorKind::out_of_space, cause.what()));
      fail(failure);
      throw failure;
    }
  }

  Error settle(const Error& own) noexcept override {
    if (!cause_) {
      // The failure may be the consequence of another rank's end, which watch() reports within this time.
      const Clock::time_point until = Clock::now() + longest_return + 200ms;
      try {
        while (own.kind() != ErrorKind::cancelled && Clock::now() < until && !os::is_own_shortage(own.os_error())) {
          watch();
          std::this_thread::sleep_for(1ms);
        }
      } catch (const Error&) {  // NOLINT(bugprone-empty-catch): watch() has set the cause
      }
      if (!cause_) fail(own_failure(own));
    }
    return *cause_;
  }

 private:
  /// A failed system call of the transport is a failure of this rank, so the cause must name it.
  [[nodiscard]] Error named(const Error& cause) const {
    return !cause.rank() && cause.os_error() != 0 ? own_failure(cause) : cause;
  }

  void fail(const Error& cause) noexcept {
    if (cause_) return;
    cause_ = cause;
    try {
      tell_failure(cause);
    } catch (...) {  // NOLINT(bugprone-empty-catch): the caller throws the cause
    }
  }

  struct Visitor {
    std::unique_ptr<Line> line;
    Clock::time_point since = Clock::now();
    std::optional<Clock::time_point> gone = {};  // when its connection was lost; it may connect again
    std::optional<Hello> hello = {};             // set once the visitor has identified itself as a rank of this job
    bool has_part = false;
    bool is_over = false;  // collect() removes it at the end of its current pass
    Message part = {};
  };

  /// Waits until each rank has sent its part.
  void collect() {
    is_collecting_ = true;
    for (;;) {
      take_in();
      for (Visitor& visitor : visitors_) hear(visitor);
      std::erase_if(visitors_, [](const Visitor& visitor) { return visitor.is_over; });
      check_lost();
      if (is_complete()) {
        is_collecting_ = false;
        return;
      }
      if (Clock::now() > deadline_) throw late();
      check_others();
      wait();
    }
  }

  void wait(milliseconds longest = group::between_questions) {
    std::vector<Line*> lines;
    for (Visitor& visitor : visitors_) lines.push_back(visitor.line.get());
    if (longest == milliseconds(0)) return transport_->wait(lines, longest);
    wait_for(lines, longest);
  }

  [[nodiscard]] bool is_complete() const {
    return std::all_of(ranks_.begin() + 1, ranks_.end(),
                       [](const Visitor* visitor) { return visitor != nullptr && visitor->has_part; });
  }

  void take_in() {
    std::vector<std::unique_ptr<Line>> arrivals;
    try {
      arrivals = transport_->arrivals();
    } catch (const Error& cause) {
      // Connections of strangers may have used up the descriptors or the memory.
      if (cause.os_error() == 0 || std::erase_if(visitors_, [](const Visitor& one) { return !one.hello; }) == 0)
        throw own_failure(cause);
      strangers_(
          fmt::format("{}: rank 0 closed all connections that had sent no hello: {}", terms_.call, cause.what()));
    }
    for (auto& line : arrivals) {
      visitors_.push_back({.line = std::move(line)});
      // The Hello of a rank has usually arrived already. Reading it now prevents that the rank counts as a stranger.
      hear(visitors_.back());
    }
    std::size_t silent = 0;
    for (auto visitor = visitors_.rbegin(); visitor != visitors_.rend(); ++visitor)
      if (!visitor->hello &&
          (++silent > most_strangers + ranks_.size() || Clock::now() - visitor->since > longest_silence))
        drop(*visitor, silent > most_strangers + ranks_.size() ? "too many of them are silent" : "it is silent");
  }

  void drop(Visitor& visitor, const char* why) {
    strangers_(fmt::format("{}: rank 0 closes a connection from {}, which does not belong to this job: {}", terms_.call,
                           visitor.line->from(), why));
    visitor.is_over = true;
  }

  void hear(Visitor& visitor) {
    if (visitor.is_over) return;
    while (!visitor.is_over) {
      visitor.line->move();
      auto message = visitor.line->next({.size = terms_.size, .is_root = true, .is_known = visitor.hello.has_value()});
      if (!message) break;
      if (visitor.hello)
        take(visitor, *message);
      else
        greet(visitor, *message);
    }
    if (visitor.is_over || visitor.gone) return;
    const auto end = visitor.line->end();
    if (!end) return;
    if (!visitor.hello && end->is_garbage) return drop(visitor, "it sent no valid hello");
    if (!visitor.hello) {
      visitor.is_over = true;
      return;
    }
    if (end->is_garbage)
      throw error(ErrorKind::corrupt,
                  fmt::format("{} sent bytes that are not a message of the rendezvous ({})", name_of(*visitor.hello),
                              end->words),
                  details_of(*visitor.hello));
    visitor.gone = Clock::now();
  }

  /// Step 1.
  void greet(Visitor& visitor, const Message& message) {
    Hello hello;
    std::memcpy(&hello, message.body.data(), sizeof hello);
    if (hello.token != token_) {
      if (!message.is_turned) visitor.line->send(make_message(Word::other_job));
      return drop(visitor, "it belongs to another job");
    }
    visitor.hello = hello;
    if (message.is_turned)
      throw error(
          ErrorKind::version,
          fmt::format("a rank on host {} has another byte order. Start all ranks on machines with the same byte order",
                      get_text(hello.host)),
          {.host = get_text(hello.host)});
    if (get_text(hello.version) != version())
      throw error(ErrorKind::version,
                  fmt::format("{} runs Muster {}, rank 0 runs {}. Start all ranks with one version", name_of(hello),
                              get_text(hello.version), version()),
                  details_of(hello));
    if (hello.size != terms_.size)
      throw error(ErrorKind::rank_mismatch,
                  fmt::format("{} was started as one of {} ranks, rank 0 as one of {}. Give each job its own key",
                              name_of(hello), hello.size, terms_.size),
                  details_of(hello));
    if (hello.rank < 0 || hello.rank >= terms_.size)
      throw error(ErrorKind::rank_mismatch,
                  fmt::format("{} cannot be one of {} ranks: ranks are numbered from 0", name_of(hello), terms_.size),
                  details_of(hello));
    Visitor*& known = ranks_[static_cast<std::size_t>(hello.rank)];
    const Hello* other = hello.rank == 0 ? &own_ : known != nullptr ? &*known->hello : nullptr;
    // A rank whose first connection broke connects again.
    const bool is_again = known != nullptr && other->pid == hello.pid && other->host == hello.host;
    if (other != nullptr && !is_again)
      throw error(
          ErrorKind::rank_mismatch,
          fmt::format("two processes are rank {}: {}; and {}. Give each process its own rank, and each job its own key",
                      number_of(hello), process_text(*other), process_text(hello)),
          details_of(hello));
    // A hello that was under way for long may arrive after the rank has left its relay and has joined in another way.
    if (known != nullptr && (visitor.line->end() || hello.attempt < other->attempt)) {
      visitor.is_over = true;
      return;
    }
    if (known != nullptr) known->is_over = true;
    known = &visitor;
    visitor.line->send(make_message(Word::heard, std::as_bytes(std::span(&own_, 1))));
  }

  /// Step 2.
  void take(Visitor& visitor, Message& message) {
    if (message.word == Word::failure) throw failure_of(message);
    if (message.word == Word::late) {
      if (is_collecting_) throw late();
      return;  // all parts have already been sent to this rank
    }
    if (visitor.has_part)
      throw error(ErrorKind::corrupt, fmt::format("{} sent its part twice", name_of(*visitor.hello)),
                  details_of(*visitor.hello));
    visitor.part = std::move(message);
    visitor.has_part = true;
  }

  void check_lost() const {
    for (const Visitor& visitor : visitors_)
      if (visitor.gone && visitor.hello && (visitor.has_part || Clock::now() - *visitor.gone > longest_return))
        throw lost(visitor);
  }
  [[nodiscard]] Error lost(const Visitor& visitor) const {
    return error(
        ErrorKind::peer_lost,
        fmt::format("{} died or left during the rendezvous: {}", name_of(*visitor.hello), visitor.line->end()->words),
        details_of(*visitor.hello));
  }

  [[nodiscard]] const Visitor* visitor_of(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }
  /// Names the relay of a rank, for messages.
  [[nodiscard]] std::string behind(const Visitor& visitor) const {
    const Hello* const relay = visitor.line->relay();
    return relay == nullptr ? "" : fmt::format(", behind rank {}, pid {}", number_of(*relay), relay->pid);
  }

  [[nodiscard]] Error late() const {
    constexpr std::size_t most_names = 8;
    std::string names;
    std::vector<int> missing;
    for (int rank = 1; rank < terms_.size; ++rank) {
      const Visitor* const visitor = visitor_of(rank);
      if (visitor != nullptr && visitor->has_part) continue;
      missing.push_back(rank);
      if (missing.size() > most_names) continue;
      names += fmt::format("{}rank {}{}", names.empty() ? "" : ", ", terms_.number(rank),
                           visitor != nullptr ? fmt::format(" ({}{}), which has joined and does not respond",
                                                            process_text(*visitor->hello), behind(*visitor))
                                              : transport_->trace_of(rank));
    }
    if (missing.size() > most_names) names += fmt::format(" and {} more", missing.size() - most_names);
    // Rank 0 has received all parts: some rank still waits for the message that contains them.
    if (missing.empty())
      return error(ErrorKind::timeout,
                   "not all ranks completed the rendezvous before the deadline. Check whether a rank is stopped, or "
                   "raise MUSTER_TIMEOUT (seconds)",
                   {.rank = terms_.number(0)});
    ErrorDetails details{.rank = terms_.number(missing.front())};
    // A rank that has joined and does not respond may be the relay of ranks that rank 0 has not seen.
    const auto joined = std::ranges::find_if(missing, [this](int rank) { return visitor_of(rank) != nullptr; });
    if (joined != missing.end()) {
      const Visitor* const visitor = visitor_of(*joined);
      // A relay that is stopped also silences the ranks behind it.
      const Hello* const relay = visitor->line->relay();
      const bool is_cut_off = relay != nullptr && std::ranges::find(missing, relay->rank) != missing.end();
      details = details_of(is_cut_off ? *relay : *visitor->hello);
    }
    return error(ErrorKind::timeout,
                 fmt::format("{} waited {} {} for {} of {} ranks. {}", name_of(own_), since(begin_), terms_.place,
                             names, terms_.size, terms_.hint),
                 std::move(details));
  }

  /// Step 3.
  void distribute() {
    members_.push_back({.rank = 0, .pid = own_.pid, .host = get_text(own_.host), .payload = own_part_.payload});
    std::vector<int> descriptors = own_part_.descriptors;
    std::vector<std::uint32_t> counts{static_cast<std::uint32_t>(descriptors.size())};
    std::vector<Line*> lines;
    for (std::size_t rank = 1; rank < ranks_.size(); ++rank) {
      Visitor& visitor = *ranks_[rank];
      for (const os::Fd& descriptor : visitor.part.descriptors) descriptors.push_back(descriptor.get());
      counts.push_back(static_cast<std::uint32_t>(visitor.part.descriptors.size()));
      members_.push_back({.rank = static_cast<int>(rank),
                          .pid = visitor.hello->pid,
                          .host = get_text(visitor.hello->host),
                          .address = visitor.line->address(),
                          .payload = std::move(visitor.part.body),
                          .descriptors = std::move(visitor.part.descriptors)});
      visitor.has_part = false;
      lines.push_back(visitor.line.get());
    }
    const bool is_first = std::exchange(is_first_, false);
    if (terms_.needed && is_first) {
      // A relay may leave when it has its own message, so those of the ranks behind it come first.
      for (const bool is_behind : {true, false})
        for (std::size_t rank = 1; rank < ranks_.size(); ++rank)
          if ((lines[rank - 1]->relay() != nullptr) == is_behind)
            lines[rank - 1]->send(
                make_message(Word::all, encode(members_, counts, ranks_for(static_cast<int>(rank), true), true)));
    } else {
      transport_->tell_all(lines, make_message(Word::all, encode(members_, counts, ranks_for(1, is_first), is_first),
                                               std::move(descriptors)));
    }
    const Clock::time_point until = std::max(deadline_, Clock::now() + last_words);
    for (;;) {
      const Visitor* stuck = nullptr;
      for (std::size_t rank = 1; rank < ranks_.size(); ++rank) {
        Visitor& visitor = *ranks_[rank];
        hear(visitor);
        if (visitor.line->is_drained()) continue;
        // A rank that has received everything may close its connection: its rendezvous has ended.
        if (visitor.gone) throw lost(visitor);
        stuck = &visitor;
      }
      if (stuck == nullptr) return;
      if (Clock::now() > until) {
        const Hello& stopped = stuck->line->relay() != nullptr ? *stuck->line->relay() : *stuck->hello;
        throw error(ErrorKind::timeout,
                    fmt::format("{} did not receive its messages within {}. Check whether that process is stopped",
                                name_of(stopped), since(begin_)),
                    details_of(stopped));
      }
      check_others();
      wait_for(lines);
    }
  }

  /// Sends the cause to the ranks that have connected, and to those that connect within time_for_words().
  void tell_failure(const Error& cause) {
    transport_->give_up();
    const OutgoingPointer message = failure_message(cause);
    // A rank whose relay is lost may connect again to receive the cause.
    std::erase_if(visitors_, [](const Visitor& visitor) {
      return visitor.is_over || visitor.gone || (visitor.line->relay() != nullptr && visitor.line->is_over());
    });
    std::vector<Line*> lines;
    std::size_t told = 0;
    for (Visitor& visitor : visitors_)
      if (visitor.hello) lines.push_back(visitor.line.get());
    told += lines.size();
    transport_->tell_all(lines, message);
    // A dead rank does not connect any more.
    const std::size_t dead = cause.kind() == ErrorKind::peer_lost ? 1 : 0;
    const Clock::time_point until = Clock::now() + time_for_words(cause);
    for (;;) {
      try {
        for (auto& line : transport_->arrivals()) visitors_.push_back({.line = std::move(line)});
      } catch (const Error&) {
        // A rank that has received the failure closes its connection, which frees a descriptor.
        std::this_thread::sleep_for(5ms);
      }
      for (Visitor& visitor : visitors_) {
        try {
          told += tell(visitor, message) ? 1 : 0;
        } catch (const Error&) {
          visitor.is_over = true;
        }
      }
      std::erase_if(visitors_, [](const Visitor& visitor) { return visitor.is_over; });
      const bool is_told =
          std::ranges::none_of(visitors_, [](const Visitor& visitor) { return visitor.hello.has_value(); });
      if ((is_told && told + dead + 1 >= ranks_.size()) || Clock::now() >= until) return;
      wait();
    }
  }

  /// Returns true if the visitor has sent its Hello only now; the failure is then sent to it.
  bool tell(Visitor& visitor, const OutgoingPointer& failure) {
    visitor.line->move();
    const bool is_new = !visitor.hello;
    if (is_new) {
      const auto hello = visitor.line->next({.size = terms_.size, .is_root = true});
      visitor.is_over = visitor.line->end().has_value();
      if (!hello) return false;
      visitor.hello.emplace();
      std::memcpy(&*visitor.hello, hello->body.data(), sizeof(Hello));
      visitor.is_over = visitor.hello->token != token_;
      if (visitor.is_over) return false;
      visitor.line->send(failure);
    }
    // Closing a connection with unread bytes would reset it, and the rank could lose the failure.
    while (visitor.line->next({.size = terms_.size, .is_root = true, .is_known = true})) continue;
    visitor.is_over = visitor.line->is_over() || visitor.line->end();
    return is_new;
  }

  Clock::time_point begin_;
  Clock::time_point deadline_;
  Token token_{};
  bool is_first_ = true;  // the round is the first one
  bool is_collecting_ = false;
  RoundPart own_part_;
  std::list<Visitor> visitors_;
  std::vector<Visitor*> ranks_;  // by rank; null: that rank has not joined
  std::vector<Member> members_;  // filled once all parts have arrived
  std::optional<Error> cause_;   // set when the rendezvous has failed
  RareLog strangers_{LogLevel::warning};
};

}  // namespace

std::unique_ptr<Session::Side> make_root(Terms terms, std::unique_ptr<Connector> transport) {
  return std::make_unique<Root>(std::move(terms), std::move(transport));
}

}  // namespace muster::rendezvous
