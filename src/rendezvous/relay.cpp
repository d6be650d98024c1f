// SPDX-License-Identifier: Apache-2.0
// The step numbers are those of relay.hpp.
#include "src/rendezvous/relay.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "muster/version.hpp"
#include "src/base/fixed_string.hpp"
#include "src/group/watchdog.hpp"
#include "src/os/process.hpp"
#include "src/rendezvous/unix.hpp"

namespace muster::rendezvous {
namespace {

using namespace std::chrono_literals;

constexpr std::chrono::seconds between_cards{1};
// A relay waits at its end until the ranks behind it have received everything: at most this long while none of them
// receives a byte, and at most this long in total.
constexpr std::chrono::seconds longest_stall{1};
constexpr std::chrono::seconds longest_passing{30};
// A rank waits for an answer before it sends more, so few messages of it are ever under way.
constexpr std::size_t most_queued = 8;
// Trunk::next() takes at most this many messages of ranks behind the relay, so that rank 0 keeps its deadlines.
constexpr int most_in_one_call = 256;

Word word_of(const OutgoingMessage& message) {
  MessageHead head;
  std::memcpy(&head, message.bytes.data(), sizeof head);
  return head.word;
}

template <class Body>
OutgoingPointer message_of(Word word, const Body& body) {
  return make_message(word, std::as_bytes(std::span(&body, 1)));
}

OutgoingPointer again(const Message& message) {
  return make_message(message.word, message.body);
}

}  // namespace

std::string relay_name(const Token& token, const std::string& address) {
  return local_name(fmt::format("relay {} {} {}", version(), os::hex_text(token), address));
}

/// The relay's own line. It passes the messages for the ranks behind the relay on.
class Relay::TrunkEnd final : public FilteredLine {
 public:
  TrunkEnd(std::unique_ptr<SocketLine> socket, Relay& relay) : FilteredLine(std::move(socket)), relay_(relay) {
    relay_.trunk_ = &carrier();
  }
  ~TrunkEnd() override { relay_.trunk_ = nullptr; }
  TrunkEnd& operator=(TrunkEnd&&) = delete;

  void send(const OutgoingPointer& message) override {
    if (word_of(*message) == Word::failure) relay_.own_failure_ = message;
    FilteredLine::send(message);
  }
  std::optional<Message> next(const MessageLimits& limits) override {
    MessageLimits wider = limits;
    wider.is_trunk = true;
    while (!garbage_) {
      auto message = FilteredLine::next(wider);
      if (!message) return std::nullopt;
      std::optional<Message> own;
      if (!relay_.take_from_root(std::move(*message), own))
        garbage_ = End{.is_garbage = true, .words = "a malformed message for the ranks of this host"};
      if (own) return own;
    }
    return std::nullopt;
  }
  [[nodiscard]] std::optional<End> end() const override { return garbage_ ? garbage_ : FilteredLine::end(); }

 private:
  Relay& relay_;
  std::optional<End> garbage_;
};

Relay::~Relay() {
  try {
    listener_.reset();
    if (!failure_) failure_ = own_failure_;
    tell_failure();
    const Clock::time_point begin = Clock::now();
    Clock::time_point moved = begin;
    std::uint64_t sent_before = 0;
    for (;;) {
      std::vector<SocketLine*> left;
      std::uint64_t sent = 0;
      for (Branch& branch : branches_) {
        branch.line->move();
        // Only a read detects that the rank has ended.
        while (branch.line->next({.size = own_.size, .is_root = true, .is_known = branch.hello != nullptr})) continue;
        if (!branch.line->is_drained() && !branch.line->end()) left.push_back(branch.line.get());
        sent += branch.line->sent_bytes();
      }
      const Clock::time_point now = Clock::now();
      if (std::exchange(sent_before, sent) != sent && !group::is_interrupted()) moved = now;
      if (left.empty() || now - moved > longest_stall || now - begin > longest_passing) return;
      wait_for_sockets(left, {}, 5ms);
    }
  } catch (...) {  // NOLINT(bugprone-empty-catch): the ranks see this relay end instead
  }
}

void Relay::tell_reason(const std::string& reason) {
  reason_ = reason;
  send_cards();
}

void Relay::send_cards() {
  for (Branch& branch : branches_)
    if (branch.hello && !branch.is_heard) send_card(branch);
  told_ = Clock::now();
}

std::unique_ptr<Line> Relay::make_trunk(std::unique_ptr<SocketLine> socket, const std::array<std::uint8_t, 16>& root) {
  root_ = root;
  return std::make_unique<TrunkEnd>(std::move(socket), *this);
}

void Relay::add_to(std::vector<SocketLine*>& sockets, std::vector<const os::Fd*>& listeners) const {
  if (listener_) listeners.push_back(&listener_);
  for (const Branch& branch : branches_) sockets.push_back(branch.line.get());
}

void Relay::move() {
  if (listener_) accept();
  for (Branch& branch : branches_) hear(branch);
  std::erase_if(branches_, [](const Branch& branch) { return branch.is_over; });
  if (Clock::now() - told_ > between_cards) send_cards();
}

void Relay::accept() {
  for (;;) {
    std::optional<os::Fd> socket;
    try {
      socket = os::accept_next(listener_);
      if (socket && !os::is_of_own_user(*socket)) continue;
    } catch (const Error&) {
      // This process lacks descriptors or memory. Another rank can be the relay of the ranks that still come. If the
      // listener remained, ranks that try again at the same moment could take the last descriptor from each other
      // until the deadline.
      std::erase_if(branches_, [](const Branch& branch) { return !branch.hello; });
      listener_.reset();
      if (!is_heard_) branches_.clear();
      return;
    }
    if (!socket) return;
    branches_.push_back(
        {.number = ++last_number_, .line = std::make_unique<SocketLine>(std::move(*socket), "a process of this host")});
    // The hello has usually arrived already. A rank whose hello is known survives a later failure of this loop.
    hear(branches_.back());
  }
}

void Relay::hear(Branch& branch) {
  while (!branch.is_over) {
    branch.line->move();
    const auto message = branch.line->next({.size = own_.size, .is_root = true, .is_known = branch.hello != nullptr});
    if (!message) break;
    take(branch, *message);
  }
  if (branch.is_over) return;
  // A rank that has left already may have joined in another way, or may start again. Its hello is not passed on.
  if (const auto end = branch.line->end()) return leave(branch, *end);
  if (!branch.hello && Clock::now() - branch.since > longest_silence) branch.is_over = true;
  open(branch);
}

void Relay::take(Branch& branch, const Message& message) {
  if (!branch.hello) {
    branch.is_over = message.is_turned || body_of<Hello>(message).token != own_.token;
    if (branch.is_over) return;
    branch.hello = again(message);
    send_card(branch);
    tell_failure();
    return;
  }
  if (branch.is_heard) return carry(branch, again(message));
  // A rank that rank 0 has not accepted has nothing to send.
  leave(branch, {.is_garbage = true, .words = "a message before it was accepted"});
}

void Relay::leave(Branch& branch, const Line::End& end) {
  branch.is_over = true;
  if (!branch.is_open) return;
  LineEnd report{.line = branch.number, .is_garbage = end.is_garbage ? 1U : 0U};
  put_text(report.words, end.words);
  if (trunk_ != nullptr) trunk_->send(message_of(Word::line_ended, report));
}

void Relay::open(Branch& branch) {
  if (!is_heard_ || failure_ || branch.is_open || !branch.hello) return;
  branch.is_open = true;
  send_card(branch);
  carry(branch, branch.hello);
}

void Relay::send_card(Branch& branch) {
  RelayCard card{.relay = own_};
  if (is_heard_) card.root = root_;
  put_text(card.reason, is_heard_ ? "it has not answered yet" : reason_);
  branch.line->send(message_of(Word::relay_card, card));
}

void Relay::carry(const Branch& branch, const OutgoingPointer& message) {
  if (trunk_ == nullptr) return;
  trunk_->send(carrier_of(std::span(&branch.number, 1), *message));
  trunk_->send(message);
}

void Relay::tell_failure() {
  if (!failure_) return;
  for (Branch& branch : branches_)
    if (branch.hello && !std::exchange(branch.is_told, true)) branch.line->send(failure_);
}

bool Relay::take_from_root(Message message, std::optional<Message>& own) {
  if (message.word != Word::through) {
    take_own(message);
    own = std::move(message);
    return true;
  }
  const auto carried = parse_carried(message.body, static_cast<std::size_t>(own_.size) + most_other_lines);
  auto inner = carried ? parse_whole(carried->bytes, {.size = own_.size}) : std::nullopt;
  if (!inner) return false;
  const OutgoingPointer passed = again(*inner);
  bool is_own = false;
  for (const std::uint32_t line : carried->lines) {
    is_own = is_own || line == 0;
    // The rank may have left meanwhile.
    const auto branch = std::ranges::find(branches_, line, &Branch::number);
    if (branch == branches_.end()) continue;
    if (inner->word == Word::heard) branch->is_heard = true;
    if (inner->word == Word::failure && std::exchange(branch->is_told, true)) continue;
    branch->line->send(passed);
  }
  if (!is_own) return true;
  take_own(*inner);
  own = std::move(inner);
  return true;
}

void Relay::take_own(const Message& message) {
  if (message.word == Word::failure) failure_ = again(message);
  tell_failure();
  if (message.word != Word::heard) return;
  is_heard_ = true;
  for (Branch& branch : branches_) hear(branch);
}

LineToRelay::~LineToRelay() {
  if (!is_heard_ && !end()) news_.was_silent = true;
}

std::optional<Message> LineToRelay::next(const MessageLimits& limits) {
  auto message = FilteredLine::next(limits);
  if (message && message->word == Word::heard) is_heard_ = true;
  if (message && message->word == Word::relay_card) news_.root = body_of<RelayCard>(*message).root;
  return message;
}

std::optional<Message> Trunk::next(MessageLimits limits) {
  limits.is_trunk = true;
  // The kernel holds the bytes of the other messages, so the next wait returns at once.
  for (int taken = 0; !garbage_ && taken < most_in_one_call; ++taken) {
    auto message = socket_->next(limits);
    if (!message) return std::nullopt;
    if (message->word == Word::hello) hello_ = body_of<Hello>(*message);
    if (message->word != Word::through && message->word != Word::line_ended) return message;
    if (!take(*message, limits.size))
      garbage_ = Line::End{.is_garbage = true, .words = "a malformed message of a rank behind it"};
  }
  return std::nullopt;
}

bool Trunk::take(const Message& message, int size) {
  if (message.word == Word::line_ended) {
    const auto report = body_of<LineEnd>(message);
    const auto found = branches_.find(report.line);
    if (found == branches_.end()) return false;
    found->second->end = Line::End{.is_garbage = report.is_garbage != 0, .words = get_text(report.words)};
    branches_.erase(found);
    return true;
  }
  const auto carried = parse_carried(message.body, 1);
  if (!carried || carried->lines.front() == 0) return false;
  std::shared_ptr<Branch>& branch = branches_[carried->lines.front()];
  auto inner = parse_whole(carried->bytes, {.size = size, .is_root = true, .is_known = branch != nullptr});
  const std::size_t most_lines = static_cast<std::size_t>(size) + most_other_lines;
  if (!inner || branches_.size() > most_lines) return false;
  if (!branch) {
    if (fresh_.size() >= most_lines) return false;
    branch = std::make_shared<Branch>(Branch{.number = carried->lines.front()});
    fresh_.push_back(branch);
  }
  branch->incoming.push_back(std::move(*inner));
  return branch->incoming.size() <= most_queued;
}

void Trunk::send(std::span<const std::uint32_t> lines, const OutgoingPointer& message) {
  const bool is_for_relay = lines.size() == 1 && lines.front() == 0;
  if (!is_for_relay) socket_->send(carrier_of(lines, *message));
  socket_->send(message);
}

void TrunkLine::send(const OutgoingPointer& message) {
  if (branch_ && branch_->end) return;
  const std::uint32_t line = number();
  trunk_->send(std::span(&line, 1), message);
}

std::optional<Message> TrunkLine::next(const MessageLimits& limits) {
  if (!branch_) return trunk_->next(limits);
  if (branch_->incoming.empty()) return std::nullopt;
  Message message = std::move(branch_->incoming.front());
  branch_->incoming.pop_front();
  return message;
}

}  // namespace muster::rendezvous
