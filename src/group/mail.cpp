// SPDX-License-Identifier: Apache-2.0
#include "src/group/mail.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "src/group/error_propagation.hpp"
#include "src/group/group.hpp"
#include "src/group/progress.hpp"

namespace muster::group {
namespace {

/// A step receives at most this many packets from each rank, so that it ends.
constexpr int most_packets = 64;

/// Group::send returns at once while its messages fit into the credit, whatever the receiver does. Its messages are
/// received in order, so each can wait for credit behind the previous one.
bool waits_for_credit(std::int64_t tag) noexcept {
  return tag == static_cast<std::int64_t>(Subject::caller);
}

/// Returns the pool of credit (Mail::PeerQueue) that counts this message.
std::size_t pool_of(std::int64_t tag) noexcept {
  return waits_for_credit(tag) ? 0 : 1;
}

/// Returns the credit that a message of this length uses.
constexpr std::uint64_t cost_of(std::uint64_t bytes) noexcept {
  return std::max(bytes, Mail::least_cost);
}

/// The keys of the receives that a message can match. Wildcards do not match the library's own tags.
struct Patterns {
  Patterns(int from, std::int64_t tag)
      : keys{{{from, tag}, {Mail::any_rank, tag}, {from, Mail::any_tag}, {Mail::any_rank, Mail::any_tag}}},
        count(tag < 0 ? 1 : keys.size()) {}
  [[nodiscard]] std::span<const std::pair<int, std::int64_t>> all() const { return std::span(keys).first(count); }

  std::array<std::pair<int, std::int64_t>, 4> keys;
  std::size_t count;
};

/// Collectives need no credit: their receiver always waits for the message.
bool needs_credit(std::int64_t tag) noexcept {
  return tag != static_cast<std::int64_t>(Subject::collective);
}

}  // namespace

struct Mail::MailHeader {
  enum class Kind : std::uint32_t { whole = 1, announcement, wanted, refused, piece, part, credit };

  Kind kind = Kind::whole;
  std::uint32_t label_bytes = 0;
  std::int64_t tag = 0;
  std::uint64_t id = 0;     // number that the sender gave to an announced message
  std::uint64_t bytes = 0;  // length of the body; for a piece: its offset in the body; for credit: the returned bytes
};
static_assert(std::tuple_size_v<PacketHead> == 32);

template <class Entry>
void Mail::Ordered<Entry>::add(std::span<const Key> keys, Entry entry) {
  for (const Key& key : keys) index.emplace(key.first, key.second, next);
  entries.emplace_hint(entries.end(), next++, std::move(entry));
}

template <class Entry>
std::optional<std::uint64_t> Mail::Ordered<Entry>::oldest(std::span<const Key> keys) const {
  std::optional<std::uint64_t> first;
  for (const Key& key : keys) {
    const auto found = index.lower_bound({key.first, key.second, 0});
    if (found == index.end() || Key(std::get<0>(*found), std::get<1>(*found)) != key) continue;
    if (!first || std::get<2>(*found) < *first) first = std::get<2>(*found);
  }
  return first;
}

template <class Entry>
Entry Mail::Ordered<Entry>::take(std::uint64_t number, std::span<const Key> keys) {
  for (const Key& key : keys) index.erase({key.first, key.second, number});
  return std::move(entries.extract(number).mapped());
}

template <class Message>
void Mail::end(std::shared_ptr<Message> message) {
  message->is_done.store(true, std::memory_order_release);
  --under_way_;
  ended_.push_back(std::move(message));
}

Mail::Mail(BaseGroup& group) : group_(group) {}
Mail::~Mail() = default;

Mail::PeerQueue& Mail::lane(int rank) {
  std::shared_ptr<PeerQueue>& lane = lanes_[rank];
  if (!lane) lane = std::make_shared<PeerQueue>();
  return *lane;
}

std::shared_ptr<Mail::OutgoingMail> Mail::send(Sending message) {
  (void)take_ended();
  is_used_ = true;
  message.id = next_id_++;
  auto sending = std::make_shared<OutgoingMail>(std::move(message));
  PeerQueue& lane = this->lane(sending->to);
  // Credit may have arrived in packets that this rank has not read yet.
  if (!has_credit(lane, *sending))
    while (take_packets()) continue;
  lane.queue.push_back(sending);
  ++under_way_;
  (void)push(sending->to);
  tell_pending();
  return sending;
}

std::shared_ptr<Mail::IncomingMail> Mail::receive(Receiving wanted) {
  (void)take_ended();
  is_used_ = true;
  auto receive = std::make_shared<IncomingMail>(std::move(wanted));
  const Key key{receive->from, receive->tag};
  const auto number = unexpected_.oldest({&key, 1});
  if (!number) {
    receives_.add({&key, 1}, receive);
    ++under_way_;
    tell_pending();
    return receive;
  }
  const Envelope& envelope = unexpected_.entries.at(*number).envelope;
  Unexpected message = unexpected_.take(*number, Patterns(envelope.from, envelope.tag).all());
  ++under_way_;
  if (message.id != 0) {
    answer(receive, std::move(message.envelope), message.id);
  } else {
    give_credit(message.envelope);
    deliver(receive, std::move(message.envelope), message.body);
  }
  tell_pending();
  return receive;
}

const Envelope* Mail::find(int from, std::int64_t tag) const {
  const Key key{from, tag};
  const auto number = unexpected_.oldest({&key, 1});
  return number ? &unexpected_.entries.at(*number).envelope : nullptr;
}

bool Mail::take_packets() {
  senders_.clear();
  has_forwarded_ = group_.collect_packets(senders_);
  bool has_taken = false;
  for (const int rank : senders_)
    for (int packets = 0; packets < most_packets && take(rank); ++packets) has_taken = true;
  return has_taken;
}

bool Mail::step() {
  if (is_abandoned_) return false;
  bool has_moved = take_packets();
  has_moved = has_moved || has_forwarded_;
  for (auto lane = lanes_.begin(); lane != lanes_.end();) {
    const int rank = lane->first;
    has_moved = push(rank) || has_moved;
    // A failure abandons all messages.
    lane = lanes_.upper_bound(rank);
  }
  if (has_moved) {
    tell_pending();
    RankProgress::moved();
  }
  return has_moved;
}

void Mail::wait(const std::function<bool()>& done, int rank, const WaitOptions& options) {
  (void)take_ended();
  if (done()) return;
  std::vector<int> on;
  if (rank == any_rank)
    std::ranges::copy_if(group_.all(), std::back_inserter(on), [&](int each) { return each != group_.rank(); });
  else
    on.push_back(rank);
  const auto is_done = [&] {
    // A rank that only forwards packets must also look for failures.
    for (int forwarding = 0; !done();)
      if (!step() || (has_forwarded_ && ++forwarding == most_packets)) return false;
    return true;
  };
  // Every packet of the group wakes this wait, so Progress need not poll this mail.
  const bool was_waited_for = std::exchange(is_waited_for_, true);
  tell_pending();
  try {
    group_.wait_for_packets(is_done, on, options);
  } catch (...) {
    abandon();
    throw;
  }
  is_waited_for_ = was_waited_for;
  tell_pending();
  (void)take_ended();
}

void Mail::keep_stepping() noexcept {
  is_used_ = true;
  ++under_way_;
  tell_pending();
}

void Mail::abandon() noexcept {
  is_abandoned_ = true;
  try {
    for (auto& [rank, lane] : lanes_) ended_.push_back(std::move(lane));
    for (auto& [number, receive] : receives_.entries) ended_.push_back(std::move(receive));
  } catch (const std::bad_alloc&) {
    // The messages are dropped here instead of in take_ended().
  }
  lanes_.clear();
  receives_ = {};
  unexpected_ = {};
  under_way_ = 0;
  tell_pending();
}

void Mail::tell_pending() noexcept {
  const bool is_pending = under_way_ != 0 && !is_waited_for_;
  if (is_pending_.exchange(is_pending, std::memory_order_relaxed) == is_pending) return;
  RankProgress::add_pending(is_pending ? 1 : -1);
}

bool Mail::post(int to, const MailHeader& head, std::span<const std::byte> packet) {
  static_assert(sizeof(MailHeader) == sizeof(PacketHead));
  PacketHead begin;
  std::memcpy(begin.data(), &head, sizeof head);
  return group_.try_send(to, begin, packet);
}

bool Mail::see_off(int to) {
  PeerQueue& lane = this->lane(to);
  if (lane.leaving.empty() || !group_.packets_have_left(to)) return false;
  for (std::shared_ptr<OutgoingMail>& each : std::exchange(lane.leaving, {})) end(std::move(each));
  return true;
}

bool Mail::push(int to) {
  const bool has_posted = post_all(to);
  return see_off(to) || has_posted;
}

std::uint64_t Mail::eager() const noexcept {
  return std::max<std::uint64_t>(promised, group_.longest_packet());
}

bool Mail::has_credit(const PeerQueue& lane, const OutgoingMail& message) const noexcept {
  return cost_of(message.label.size() + message.body.size()) <=
         eager() - std::min(eager(), lane.lent[pool_of(message.tag)]);
}

Mail::Posted Mail::post_next(int to, OutgoingMail& message) {
  PeerQueue& lane = this->lane(to);
  const std::size_t packet_bytes = group_.longest_packet();
  const std::size_t all = message.label.size() + message.body.size();
  MailHeader head{MailHeader::Kind::whole, static_cast<std::uint32_t>(message.label.size()), message.tag, 0,
                  message.body.size()};
  const bool is_eager = needs_credit(message.tag) ? has_credit(lane, message) : all <= packet_bytes;
  // A message whose first packet was sent eagerly is completed eagerly.
  if (message.sent == 0 && !is_eager) {
    if (waits_for_credit(message.tag) && cost_of(all) <= eager()) return Posted::nothing;
    head.kind = MailHeader::Kind::announcement;
  }
  if (head.kind == MailHeader::Kind::announcement) {
    head.id = message.id;
    return post(to, head, message.label) ? Posted::announcement : Posted::nothing;
  }
  const std::size_t left = all - message.sent;
  if (left > packet_bytes) head.kind = MailHeader::Kind::part;
  const std::size_t bytes = std::min(left, packet_bytes);
  std::vector<std::byte> both;
  std::span<const std::byte> packet;
  if (message.sent >= message.label.size()) {
    packet = message.body.subspan(message.sent - message.label.size(), bytes);
  } else {
    const auto label = std::span<const std::byte>(message.label).subspan(message.sent);
    both.assign(label.begin(), label.end());
    const auto body = message.body.first(bytes - label.size());
    both.insert(both.end(), body.begin(), body.end());
    packet = both;
  }
  if (!post(to, head, packet)) return Posted::nothing;
  if (message.sent == 0 && needs_credit(message.tag)) lane.lent[pool_of(message.tag)] += cost_of(all);
  message.sent += bytes;
  return head.kind == MailHeader::Kind::part ? Posted::part : Posted::whole;
}

bool Mail::post_all(int to) {
  PeerQueue& lane = this->lane(to);
  bool has_moved = false;
  const auto moved = [&has_moved](bool is_sent) {
    has_moved = has_moved || is_sent;
    return is_sent;
  };
  while (!lane.answers.empty()) {
    if (!moved(post(to, lane.answers.front(), {}))) return has_moved;
    lane.answers.pop_front();
    --under_way_;
  }
  bool is_waiting = false;  // a message waits for credit; only later messages of its kind wait behind it
  for (auto at = lane.queue.begin(); at != lane.queue.end();) {
    const std::shared_ptr<OutgoingMail> next = *at;
    if (is_waiting && waits_for_credit(next->tag)) {
      ++at;
      continue;
    }
    const Posted posted = post_next(to, *next);
    if (posted == Posted::nothing && next->sent == 0 && waits_for_credit(next->tag)) {
      is_waiting = true;
      ++at;
      continue;
    }
    if (!moved(posted != Posted::nothing)) return has_moved;
    if (posted == Posted::part) continue;
    at = lane.queue.erase(at);
    if (posted == Posted::announcement) {
      lane.announced.emplace(next->id, next);
    } else {
      next->is_given = true;
      lane.leaving.push_back(next);
    }
  }
  while (!lane.wanted.empty()) {
    OutgoingMail& next = *lane.wanted.front();
    const auto left = next.body.subspan(next.sent);
    const auto piece = left.first(std::min(left.size(), group_.longest_piece(to)));
    if (!moved(post(to, {.kind = MailHeader::Kind::piece, .id = next.id, .bytes = next.sent}, piece))) return has_moved;
    next.sent += piece.size();
    if (next.sent != next.body.size()) continue;
    if (next.keeper) ended_.push_back(std::move(next.keeper));
    next.is_given = true;
    lane.leaving.push_back(std::move(lane.wanted.front()));
    lane.wanted.pop_front();
  }
  return has_moved;
}

bool Mail::take(int from) {
  MailHeader head;
  std::vector<std::byte> packet;
  std::shared_ptr<IncomingMail> receive;
  std::uint64_t bytes = 0;
  const auto place = [&](const PacketHead& begin, std::size_t length) -> std::span<std::byte> {
    std::memcpy(&head, begin.data(), sizeof head);
    bytes = length;
    PeerQueue& lane = this->lane(from);
    switch (head.kind) {
      case MailHeader::Kind::piece: {
        const auto found = lane.coming.find(head.id);
        if (found == lane.coming.end()) fail(from, "a chunk that this rank has not requested");
        receive = found->second;
        if (head.bytes > receive->room.size() || length > receive->room.size() - head.bytes)
          fail(from, "more bytes than it has announced");
        return receive->room.subspan(head.bytes, length);
      }
      case MailHeader::Kind::part:
      case MailHeader::Kind::whole: {
        const std::size_t before = lane.parts.size();
        if (head.kind == MailHeader::Kind::part && before + length > eager())
          fail(from, "more bytes than it has credit for");
        if (head.kind == MailHeader::Kind::whole &&
            (before + length < head.label_bytes || before + length - head.label_bytes != head.bytes))
          fail(from, "a message of another length than it announces");
        // A message of one packet without a label is received directly into the memory of its receive.
        if (head.kind == MailHeader::Kind::whole && before == 0 && head.label_bytes == 0 &&
            (receive = take_receive(from, head.tag)) != nullptr && open(*receive, {from, head.tag, {}, head.bytes}))
          return receive->room;
        lane.parts.resize(before + length);
        return std::span(lane.parts).subspan(before);
      }
      case MailHeader::Kind::announcement:
        if (length != head.label_bytes) fail(from, "a truncated announcement");
        packet.resize(length);
        return packet;
      case MailHeader::Kind::wanted:
      case MailHeader::Kind::refused:
      case MailHeader::Kind::credit:
        if (length != 0) fail(from, "a packet of another length than its kind has");
        return {};
    }
    fail(from, "a packet of an unknown kind");
  };
  if (!group_.try_receive(from, place)) return false;
  PeerQueue& lane = this->lane(from);
  switch (head.kind) {
    case MailHeader::Kind::part:
      break;
    case MailHeader::Kind::piece:
      receive->received += bytes;
      if (receive->received == receive->room.size()) {
        lane.coming.erase(head.id);
        end(std::move(receive));
      }
      break;
    case MailHeader::Kind::credit:
      if (head.bytes > lane.lent[pool_of(head.tag)]) fail(from, "more credit than this rank has used");
      lane.lent[pool_of(head.tag)] -= head.bytes;
      break;
    case MailHeader::Kind::wanted:
    case MailHeader::Kind::refused: {
      const auto found = lane.announced.find(head.id);
      if (found == lane.announced.end()) fail(from, "an answer to a message that this rank has not announced");
      if (head.kind == MailHeader::Kind::wanted) {
        lane.wanted.push_back(std::move(found->second));
      } else {
        found->second->is_given = true;
        end(std::move(found->second));
      }
      lane.announced.erase(found);
      break;
    }
    case MailHeader::Kind::announcement: {
      Envelope envelope{from, head.tag, std::move(packet), head.bytes};
      if ((receive = take_receive(from, head.tag)) != nullptr)
        answer(receive, std::move(envelope), head.id);
      else
        unexpected_.add(Patterns(from, head.tag).all(), {std::move(envelope), {}, head.id});
      break;
    }
    case MailHeader::Kind::whole: {
      const std::vector<std::byte> all = std::exchange(lane.parts, {});
      if (receive != nullptr) {
        // The receive already has its bytes, or has failed.
        give_credit(receive->envelope);
        end(std::move(receive));
        break;
      }
      const auto body = all.begin() + head.label_bytes;
      Envelope envelope{from, head.tag, {all.begin(), body}, head.bytes};
      if ((receive = take_receive(from, head.tag)) == nullptr) {
        unexpected_.add(Patterns(from, head.tag).all(), {std::move(envelope), {body, all.end()}, 0});
        break;
      }
      give_credit(envelope);
      deliver(receive, std::move(envelope), {body, all.end()});
      break;
    }
  }
  return true;
}

std::shared_ptr<Mail::IncomingMail> Mail::take_receive(int from, std::int64_t tag) {
  const Patterns patterns(from, tag);
  const auto number = receives_.oldest(patterns.all());
  if (!number) return nullptr;
  const IncomingMail& receive = *receives_.entries.at(*number);
  const Key key{receive.from, receive.tag};
  return receives_.take(*number, {&key, 1});
}

bool Mail::open(IncomingMail& receive, Envelope envelope) {
  receive.envelope = std::move(envelope);
  try {
    receive.room = receive.place(receive.envelope);
    if (receive.room.size() != receive.envelope.bytes)
      throw Error(ErrorKind::corrupt,
                  fmt::format("message: expected {} bytes, received {}", receive.room.size(), receive.envelope.bytes));
    return true;
  } catch (const Error& error) {
    receive.error = error;
    return false;
  }
}

void Mail::deliver(const std::shared_ptr<IncomingMail>& receive, Envelope envelope, std::span<const std::byte> body) {
  if (open(*receive, std::move(envelope))) std::ranges::copy(body, receive->room.begin());
  end(receive);
}

void Mail::answer(const std::shared_ptr<IncomingMail>& receive, Envelope envelope, std::uint64_t id) {
  const int from = envelope.from;
  PeerQueue& lane = this->lane(from);
  const bool wants = open(*receive, std::move(envelope));
  if (wants) lane.coming.emplace(id, receive);
  lane.answers.push_back({.kind = wants ? MailHeader::Kind::wanted : MailHeader::Kind::refused, .id = id});
  ++under_way_;
  if (!wants) end(receive);
  (void)push(from);
}

void Mail::give_credit(const Envelope& envelope) {
  if (!needs_credit(envelope.tag)) return;
  PeerQueue& lane = this->lane(envelope.from);
  std::uint64_t& owed = lane.owed[pool_of(envelope.tag)];
  owed += cost_of(envelope.label.size() + envelope.bytes);
  if (owed < eager() / 4 && !waits_for_credit(envelope.tag)) return;
  lane.answers.push_back({.kind = MailHeader::Kind::credit, .tag = envelope.tag, .bytes = std::exchange(owed, 0)});
  ++under_way_;
  (void)push(envelope.from);
}

void Mail::fail(int from, const char* what) {
  group::fail(group_, error_of(group_.info(from), ErrorKind::corrupt,
                               fmt::format("malformed message: {} sends {}", name_of(group_.info(from)), what)));
}

}  // namespace muster::group
