// SPDX-License-Identifier: Apache-2.0
#include "src/collectives/mail.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <span>

#include "src/sync/failing.hpp"

namespace muster::collectives {
namespace {

bool meets(int from, std::int64_t tag, int wanted_from, std::int64_t wanted_tag) noexcept {
  const bool has_tag = wanted_tag == any_tag ? tag >= 0 : tag == wanted_tag;
  return has_tag && (wanted_from == any_rank || wanted_from == from);
}

}  // namespace

struct Mail::Head {
  enum class Kind : std::uint32_t { whole = 1, announcement, wanted, refused, piece };

  Kind kind = Kind::whole;
  std::uint32_t label_bytes = 0;
  std::int64_t tag = 0;
  std::uint64_t id = 0;     // the sender's number of what is not whole
  std::uint64_t bytes = 0;  // of the body; of a piece: how many are before it there
};
static_assert(std::tuple_size_v<sync::PacketHead> == 32);

Mail::Mail(sync::Group& group) : group_(group), lanes_(static_cast<std::size_t>(group.size())) {}

std::shared_ptr<Mail::Sending> Mail::send(Sending message) {
  message.id = next_id_++;
  auto sending = std::make_shared<Sending>(std::move(message));
  lane(sending->to).queue.push_back(sending);
  (void)push(sending->to);
  return sending;
}

std::shared_ptr<Mail::Receiving> Mail::receive(Receiving wanted) {
  auto receive = std::make_shared<Receiving>(std::move(wanted));
  const auto found = std::ranges::find_if(unexpected_, [&](const Unexpected& each) {
    return meets(each.envelope.from, each.envelope.tag, receive->from, receive->tag);
  });
  if (found == unexpected_.end()) {
    receives_.push_back(receive);
    return receive;
  }
  const Unexpected message = std::move(*found);
  unexpected_.erase(found);
  if (message.id != 0) {
    answer(receive, message.envelope, message.id);
  } else if (open(*receive, message.envelope)) {
    std::ranges::copy(message.body, receive->room.begin());
    receive->is_done = true;
  }
  return receive;
}

const Envelope* Mail::find(int from, std::int64_t tag) const {
  const auto found = std::ranges::find_if(
      unexpected_, [&](const Unexpected& each) { return meets(each.envelope.from, each.envelope.tag, from, tag); });
  return found == unexpected_.end() ? nullptr : &found->envelope;
}

bool Mail::step() {
  bool has_moved = false;
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (rank == group_.rank()) continue;
    while (take(rank)) has_moved = true;
    has_moved = push(rank) || has_moved;
  }
  if (has_moved && on_moved_) on_moved_();
  return has_moved;
}

void Mail::wait(const std::function<bool()>& done, int rank, const WaitOptions& options) {
  if (done()) return;
  std::vector<int> on;
  for (int each = 0; each < group_.size(); ++each)
    if (each != group_.rank() && (rank == any_rank || rank == each)) on.push_back(each);
  const auto is_done = [&] {
    while (!done())
      if (!step()) return false;
    return true;
  };
  group_.wait_for_packets(is_done, on, options);
}

bool Mail::post(int to, const Head& head, Bytes packet) {
  static_assert(sizeof(Head) == sizeof(sync::PacketHead));
  sync::PacketHead begin;
  std::memcpy(begin.data(), &head, sizeof head);
  return group_.try_send(to, begin, packet);
}

bool Mail::see_off(int to) {
  Lane& lane = this->lane(to);
  if (lane.leaving.empty() || !group_.packets_have_left(to)) return false;
  for (const std::shared_ptr<Sending>& each : lane.leaving) each->is_done = true;
  lane.leaving.clear();
  return true;
}

bool Mail::push(int to) {
  const bool has_posted = post_all(to);
  return see_off(to) || has_posted;
}

bool Mail::post_all(int to) {
  Lane& lane = this->lane(to);
  bool has_moved = false;
  const auto moved = [&has_moved](bool is_sent) {
    has_moved = has_moved || is_sent;
    return is_sent;
  };
  while (!lane.answers.empty()) {
    const auto [id, wants] = lane.answers.front();
    if (!moved(post(to, {.kind = wants ? Head::Kind::wanted : Head::Kind::refused, .id = id}, {}))) return has_moved;
    lane.answers.pop_front();
  }
  while (!lane.queue.empty()) {
    const std::shared_ptr<Sending>& next = lane.queue.front();
    const bool is_whole = next->label.size() + next->body.size() <= group_.longest_packet();
    const Head head{is_whole ? Head::Kind::whole : Head::Kind::announcement,
                    static_cast<std::uint32_t>(next->label.size()), next->tag, is_whole ? 0 : next->id,
                    next->body.size()};
    std::vector<std::byte> both;
    Bytes packet = is_whole ? next->body : Bytes(next->label);
    if (is_whole && !next->label.empty()) {
      both = next->label;
      both.insert(both.end(), next->body.begin(), next->body.end());
      packet = both;
    }
    if (!moved(post(to, head, packet))) return has_moved;
    if (is_whole) {
      next->is_given = true;
      lane.leaving.push_back(next);
    } else {
      lane.announced.emplace(next->id, next);
    }
    lane.queue.pop_front();
  }
  while (!lane.wanted.empty()) {
    Sending& next = *lane.wanted.front();
    const Bytes left = next.body.subspan(next.sent);
    const Bytes piece = left.first(std::min(left.size(), group_.longest_piece(to)));
    if (!moved(post(to, {.kind = Head::Kind::piece, .id = next.id, .bytes = next.sent}, piece))) return has_moved;
    next.sent += piece.size();
    if (next.sent != next.body.size()) continue;
    next.keeper.reset();
    next.is_given = true;
    lane.leaving.push_back(std::move(lane.wanted.front()));
    lane.wanted.pop_front();
  }
  return has_moved;
}

bool Mail::take(int from) {
  Head head;
  std::vector<std::byte> packet;
  std::shared_ptr<Receiving> receive;
  std::uint64_t bytes = 0;
  const auto place = [&](const sync::PacketHead& begin, std::size_t length) -> Room {
    std::memcpy(&head, begin.data(), sizeof head);
    bytes = length;
    if (head.kind == Head::Kind::piece) {
      const auto found = lane(from).coming.find(head.id);
      if (found == lane(from).coming.end()) fail(from, "a piece that nobody has asked for");
      receive = found->second;
      if (head.bytes > receive->room.size() || length > receive->room.size() - head.bytes)
        fail(from, "more than it has announced");
      return receive->room.subspan(head.bytes, length);
    }
    if (head.kind == Head::Kind::whole && (length < head.label_bytes || length - head.label_bytes != head.bytes))
      fail(from, "a message of another length than it says");
    if (head.kind == Head::Kind::announcement && length != head.label_bytes)
      fail(from, "an announcement that is cut off");
    // What has no label goes straight to its place.
    if (head.kind == Head::Kind::whole && head.label_bytes == 0 &&
        (receive = take_receive(from, head.tag)) != nullptr && open(*receive, {from, head.tag, {}, head.bytes}))
      return receive->room;
    packet.resize(length);
    return packet;
  };
  if (!group_.try_receive(from, place)) return false;
  switch (head.kind) {
    case Head::Kind::piece:
      receive->received += bytes;
      if (receive->received == receive->room.size()) {
        receive->is_done = true;
        lane(from).coming.erase(head.id);
      }
      return true;
    case Head::Kind::wanted:
    case Head::Kind::refused: {
      const auto found = lane(from).announced.find(head.id);
      if (found == lane(from).announced.end()) fail(from, "an answer to nothing");
      if (head.kind == Head::Kind::wanted)
        lane(from).wanted.push_back(found->second);
      else
        found->second->is_given = found->second->is_done = true;
      lane(from).announced.erase(found);
      return true;
    }
    case Head::Kind::whole:
    case Head::Kind::announcement:
      break;
    default:
      fail(from, "a packet of no kind");
  }
  if (receive != nullptr) {
    receive->is_done = true;
    return true;
  }
  const auto body = packet.begin() + head.label_bytes;
  Envelope envelope{from, head.tag, {packet.begin(), body}, head.bytes};
  receive = take_receive(from, head.tag);
  if (receive == nullptr) {
    unexpected_.push_back({std::move(envelope), {body, packet.end()}, head.id});
  } else if (head.kind == Head::Kind::announcement) {
    answer(receive, std::move(envelope), head.id);
  } else if (open(*receive, std::move(envelope))) {
    std::copy(body, packet.end(), receive->room.begin());
    receive->is_done = true;
  }
  return true;
}

std::shared_ptr<Mail::Receiving> Mail::take_receive(int from, std::int64_t tag) {
  const auto found = std::ranges::find_if(
      receives_, [&](const std::shared_ptr<Receiving>& each) { return meets(from, tag, each->from, each->tag); });
  if (found == receives_.end()) return nullptr;
  std::shared_ptr<Receiving> receive = std::move(*found);
  receives_.erase(found);
  return receive;
}

bool Mail::open(Receiving& receive, Envelope envelope) {
  receive.envelope = std::move(envelope);
  try {
    receive.room = receive.place(receive.envelope);
    if (receive.room.size() != receive.envelope.bytes)
      throw Error(ErrorKind::corrupt, fmt::format("a message of {} bytes where {} were to come", receive.envelope.bytes,
                                                  receive.room.size()));
    return true;
  } catch (const Error& error) {
    receive.error = error;
    receive.is_done = true;
    return false;
  }
}

void Mail::answer(const std::shared_ptr<Receiving>& receive, Envelope envelope, std::uint64_t id) {
  Lane& lane = this->lane(envelope.from);
  const bool wants = open(*receive, std::move(envelope));
  if (wants) lane.coming.emplace(id, receive);
  lane.answers.emplace_back(id, wants);
  (void)push(receive->envelope.from);
}

void Mail::fail(int from, const char* what) {
  sync::fail(group_, sync::error_of(group_.info(from), ErrorKind::corrupt,
                                    fmt::format("{} sends {}", sync::name_of(group_.info(from)), what)));
}

}  // namespace muster::collectives
