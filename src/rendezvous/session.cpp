// SPDX-License-Identifier: Apache-2.0
// The side of ranks 1 and higher. Step numbers refer to the list in session.hpp.
#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "src/rendezvous/session_side.hpp"

namespace muster::rendezvous {
namespace {

using namespace std::chrono_literals;

// A rank waits this long for an answer from a process that may be rank 0. Then it tries again.
constexpr milliseconds longest_try = 5s;
// A rank waits this much longer than its deadline: rank 0's error names the missing ranks.
constexpr milliseconds grace = 2s;
// A rank behind a relay waits even longer, so that the relay can pass its own error on.
constexpr milliseconds relay_grace = 500ms;
// The last value of Hello::attempt. A process may meet several times under one key.
std::atomic<std::uint32_t> last_attempt{0};

class Guest final : public Session::Side {
 public:
  Guest(Terms terms, std::unique_ptr<Connector> transport) : Side(std::move(terms), std::move(transport)) { join(); }

  std::vector<Member> round(const Session::Prepare& prepare, Clock::time_point deadline) override {
    begin_ = Clock::now();
    std::optional<Error> cause;
    try {
      try {
        const RoundPart part = prepare();
        line_->send(make_message(Word::part, part.payload, part.descriptors));
        return receive_all(deadline);
      } catch (const Error& failure) {
        if (cause_) throw;
        cause = failure.kind() == ErrorKind::cancelled && failure.rank() ? failure : own_failure(failure);
      } catch (const std::exception& failure) {
        cause = own_failure(Error(ErrorKind::out_of_space, failure.what()));
      }
    } catch (const Error&) {
      line_.reset();  // so rank 0 sees that this rank has received the cause
      throw;
    }
    fail(*cause);
    line_.reset();
    throw *cause_;
  }

  void watch() override {
    if (cause_) throw *cause_;
    Line* const line = line_.get();
    transport_->wait(std::span(&line, 1), milliseconds(0));
    if (hear()) throw lost(root_, "sent an unexpected message", ErrorKind::corrupt);
  }

  Error settle(const Error& own) noexcept override {
    // A shortage of this process is never the consequence of another rank's end.
    if (!cause_ && !os::is_own_shortage(own.os_error())) listen(time_for_words(own));
    if (!cause_) fail(own_failure(own));
    return *cause_;
  }

 private:
  /// Sends this rank's failure, and waits for the cause that rank 0 chooses for all ranks.
  void fail(const Error& own) noexcept {
    try {
      line_->send(failure_message(own));
    } catch (...) {  // NOLINT(bugprone-empty-catch): rank 0 sees this rank end instead
    }
    listen(time_for_words(own));
    if (!cause_) cause_ = own;
  }

  /// Waits at most `longest` for the cause that rank 0 sends.
  void listen(milliseconds longest) noexcept {
    const Clock::time_point until = Clock::now() + longest;
    try {
      while (Clock::now() < until)
        if (!hear()) wait();
    } catch (...) {  // NOLINT(bugprone-empty-catch): hear() has set the cause
    }
  }

  void wait() {
    Line* const line = line_.get();
    wait_for(std::span(&line, 1));
  }
  std::optional<Message> next() { return line_->next({.size = terms_.size}); }

  void join() {
    const Clock::time_point deadline = terms_.deadline;
    std::string reason = "no attempt was made";
    for (int tries = 0;; ++tries) {
      const Clock::time_point soon = std::min(deadline, Clock::now() + longest_try);
      relay_.reset();
      Hello hello = own_;
      hello.attempt = ++last_attempt;
      line_ = transport_->reach(hello, soon, reason);
      if (line_ && is_heard(soon, reason)) return;
      line_.reset();
      const Clock::time_point next_try = Clock::now() + transport_->pause(tries);
      do {
        check_others();
        if (Clock::now() >= deadline)
          throw error(ErrorKind::timeout,
                      fmt::format("{} could not reach rank {} {} within {}: {}. {}", name_of(own_), terms_.number(0),
                                  terms_.place, since(begin_), reason, terms_.hint),
                      {.rank = terms_.number(0)});
        wait_for({}, std::min(group::between_questions,
                              std::chrono::ceil<milliseconds>(std::min(next_try, deadline) - Clock::now())));
      } while (Clock::now() < next_try);
    }
  }

  bool is_heard(Clock::time_point soon, std::string& reason) {
    // The reason of the relay, which says more than the end of the connection to it.
    std::string relayed;
    for (;;) {
      line_->move();
      if (const auto message = next()) {
        if (message->word == Word::failure) throw failure_of(*message);
        if (message->word == Word::heard) {
          root_ = body_of<Hello>(*message);
          return true;
        }
        if (message->word == Word::relay_card) {
          const auto card = body_of<RelayCard>(*message);
          relay_ = card.relay;
          relayed = get_text(card.reason);
          if (!relayed.empty()) relayed += fmt::format(", tried by {}", name_of(*relay_));
          soon = std::min(terms_.deadline, Clock::now() + longest_try);
          continue;
        }
        reason =
            message->word == Word::other_job
                ? fmt::format("{} is rank 0 of another job", line_->from())
                : fmt::format("{} answered, but not as rank 0 of Muster (another program, or an incompatible version)",
                              line_->from());
        return false;
      }
      if (const auto end = line_->end()) {
        reason =
            !relayed.empty() ? relayed
            : end->is_garbage
                ? fmt::format("{} answered, but not as rank 0 of Muster (another program, or an incompatible version)",
                              line_->from())
                : fmt::format("{} ({})", end->words, line_->from());
        return false;
      }
      if (Clock::now() >= soon) {
        const std::string other =
            relay_ ? name_of(*relay_) + ", which passes the messages of its host on," : line_->from();
        reason =
            !relayed.empty() && soon == terms_.deadline
                ? relayed
                : fmt::format("{} does not answer as rank 0 of Muster (another program, or a stopped process)", other);
        return false;
      }
      check_others();
      wait();
    }
  }

  /// Returns the next message. Throws the failure that rank 0 has sent, or an error for the loss of rank 0.
  std::optional<Message> hear() {
    line_->move();
    auto message = next();
    if (message && message->word == Word::failure) {
      cause_ = failure_of(*message);
      throw *cause_;
    }
    const auto end = line_->end();
    if (!message && end)
      throw lost(relay_.value_or(root_),
                 fmt::format("{} during the rendezvous: {}", end->is_garbage ? "sent malformed bytes" : "died or left",
                             end->words),
                 end->is_garbage ? ErrorKind::corrupt : ErrorKind::peer_lost);
    return message;
  }

  std::vector<Member> receive_all(Clock::time_point deadline) {
    bool is_late = false;
    for (;;) {
      if (auto message = hear()) {
        auto members =
            message->word == Word::all ? decode(*message, ranks_for(terms_.rank, is_first_), is_first_) : std::nullopt;
        is_first_ = false;
        if (members) return std::move(*members);
        throw lost(root_, "sent bytes that are not a message of the rendezvous", ErrorKind::corrupt);
      }
      const Clock::time_point now = Clock::now();
      if (now > deadline && !is_late) {
        is_late = true;
        line_->send(make_message(Word::late));
      }
      if (now > deadline + grace + (relay_ ? relay_grace : milliseconds(0))) throw waited_in_vain();
      check_others();
      wait();
    }
  }

  Error lost(const Hello& other, const std::string& words, ErrorKind kind) {
    return lost(error(kind, fmt::format("{} {}", name_of(other), words), details_of(other)));
  }
  Error lost(const Error& cause) {
    cause_ = cause;
    // If rank 0 still runs, it sends this cause to the other ranks.
    line_->send(failure_message(*cause_));
    return *cause_;
  }
  Error waited_in_vain() {
    const std::string words = fmt::format("did not complete the rendezvous {} within {}", terms_.place, since(begin_));
    if (!relay_) return lost(root_, words + ". Check whether that process is stopped", ErrorKind::timeout);
    return lost(error(ErrorKind::timeout,
                      fmt::format("{} {}, or {} did not pass its messages on. Check whether one of these processes is "
                                  "stopped",
                                  name_of(root_), words, name_of(*relay_)),
                      details_of(*relay_)));
  }

  std::unique_ptr<Line> line_;
  Hello root_;
  std::optional<Hello> relay_;  // the rank of this host that passes the messages of this rank on
  Clock::time_point begin_ = Clock::now();
  bool is_first_ = true;        // the round is the first one
  std::optional<Error> cause_;  // set when the rendezvous has failed
};

}  // namespace

Session::Session(Terms terms, std::unique_ptr<Connector> transport) {
  if (terms.rank == 0)
    side_ = make_root(std::move(terms), std::move(transport));
  else
    side_ = std::make_unique<Guest>(std::move(terms), std::move(transport));
}

Session::~Session() = default;

std::vector<Member> Session::round(const Prepare& prepare, Clock::time_point deadline) {
  return side_->round(prepare, deadline);
}

void Session::watch() {
  side_->watch();
}

Error Session::settle(const Error& own) noexcept {
  return side_->settle(own);
}

}  // namespace muster::rendezvous
