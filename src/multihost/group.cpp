// SPDX-License-Identifier: Apache-2.0
// Rounds, messages and duplicates. The step numbers are those of group.hpp.

#include "src/multihost/group.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "src/base/escaped.hpp"
#include "src/group/local_group.hpp"
#include "src/os/process.hpp"

namespace muster::multihost {
namespace {

using std::chrono::milliseconds;

constexpr int tags_a_group = 16;
// The longest sleep of waits within a host while a route receives data from another host.
constexpr std::chrono::microseconds busy_slice{200};

/// Several pieces of a long message are in flight at a time, so that the network never idles.
constexpr std::uint64_t most_untaken_packets = 4 << 20;
/// The maximum number of packets that one collection receives, so that it ends.
constexpr std::size_t most_collected = 256;
/// The maximum memory for packets that the group keeps.
constexpr std::uint64_t most_packet_memory = 16 << 20;
/// The minimum cost of a message, because the transport needs memory to remember it.
constexpr std::uint64_t least_cost = 256;

/// Small packets do not use the pool, whose buffers are whole pages.
std::shared_ptr<std::byte> memory_for_packet(BufferPool& pool, std::size_t bytes) {
  if (bytes >= 64 << 10) return pool.take(bytes, most_packet_memory);
  const auto memory = std::make_shared_for_overwrite<std::byte[]>(bytes);
  return {memory, memory.get()};
}

/// A packet that its receiver has not begun to receive.
struct Untaken {
  std::shared_ptr<std::byte> memory;
  std::span<std::byte> bytes;
  std::uint64_t cost;
  std::shared_ptr<std::atomic<std::uint64_t>> sum;  // sum of all untaken packets with the same receiver and tag

  Untaken(BufferPool& pool, std::size_t head, std::size_t piece, std::shared_ptr<std::atomic<std::uint64_t>> all)
      : memory(memory_for_packet(pool, head + piece)),
        bytes(memory.get(), head + piece),
        cost(std::max<std::uint64_t>(piece, least_cost)),
        sum(std::move(all)) {
    *sum += cost;
  }
  Untaken& operator=(Untaken&&) = delete;
  ~Untaken() { *sum -= cost; }
};

}  // namespace

HostsGroup::HostsGroup(std::shared_ptr<Context> context, int number, HostsMembership members, int rank,
                       milliseconds timeout, std::shared_ptr<FailureConsensus> parent)
    : group::BaseGroup(rank, std::move(members.ranks), members.nonce, timeout),
      context_(std::move(context)),
      number_(number),
      hosts_(std::move(members.hosts)),
      local_(std::move(members.local)),
      health_(std::make_shared<FailureConsensus>(local_, std::move(parent))),
      others_(others()) {
  context_->add_group(number_, *this);
  // A part of the group on one host needs this too: ranks of other hosts may wait for a message that this process must
  // finish sending.
  if (context_->has_other_hosts() && shared() != nullptr)
    shared()->while_waiting([this, context = context_]() -> std::chrono::nanoseconds {
      look_around();
      return context->is_under_way() ? busy_slice : std::chrono::nanoseconds(group::Watchdog::slice);
    });
  begin_progress();
}

group::LocalGroup* HostsGroup::shared() const noexcept {
  return is_alone_here() ? nullptr : static_cast<group::LocalGroup*>(local_.get());
}

auto HostsGroup::in_phase(const WaitOptions& options) {
  if (has_ended_.load()) throw *error();
  if (has_other_hosts()) context_->enter();
  return group::PhaseScope([this](const char* words) { phase_.store(words); }, options.phase);
}

int HostsGroup::tag(MessageTag kind) const noexcept {
  return (number_ + 1) * tags_a_group + static_cast<int>(kind);
}
int HostsGroup::data_tag() const noexcept {
  return tag(MessageTag::data);
}

void HostsGroup::post(int to, int tag, std::span<const std::byte> bytes, std::shared_ptr<const void> keeper,
                      SendEnd finished) {
  context_->adopt(number_of(to), transport().send(number_of(to), tag, bytes, std::move(keeper), finished));
}

bool HostsGroup::shares_memory(int rank) const {
  (void)info(rank);
  return hosts_->is_here(rank);
}

int HostsGroup::host_of(int rank) const {
  (void)info(rank);
  return hosts_->host_of[static_cast<std::size_t>(rank)];
}

std::shared_ptr<group::Region> HostsGroup::region_of(int rank) const {
  return shares_memory(rank) ? local().region_of(place_of(rank)) : nullptr;
}

std::shared_ptr<const group::PeerLiveness> HostsGroup::liveness(int rank) const {
  // For ranks of other hosts, waits find out whether a rank is alive by its answers.
  return shares_memory(rank) ? local().liveness(place_of(rank)) : BaseGroup::liveness(rank);
}

namespace {

/// The contents of an all-gather.
class GatherFold final : public group::HostFold {
 public:
  /// `all` receives the records of all ranks on the first rank of each host.
  GatherFold(const Hosts& hosts, std::size_t record_bytes, std::span<std::byte> all)
      : hosts_(hosts), record_bytes_(record_bytes), all_(all) {}

  void begin(std::span<const int>, std::span<const std::byte> here) override { parts_ = {here}; }
  void take_below(std::span<const std::byte> message) override {
    const int child = tree().children(hosts_.mine)[parts_.size() - 1];
    std::size_t ranks = 0;
    for (const int host : tree().with_all_below(child)) ranks += hosts_.on(host).size();
    check(message.size(), ranks * record_bytes_);
    parts_.push_back(message);
  }
  void up(Bytes& out) override {
    const std::size_t begin = out.size();
    for (const auto& records : parts_) out.insert(out.end(), records.begin(), records.end());
    if (hosts_.mine != 0) return;
    // The message has the hosts in preorder.
    const std::byte* next = out.data() + begin;
    for (const int host : tree().with_all_below(0))
      for (const int member : hosts_.on(host)) {
        if (record_bytes_ != 0)
          std::memcpy(all_.data() + static_cast<std::size_t>(member) * record_bytes_, next, record_bytes_);
        next += record_bytes_;
      }
  }
  void take_above(std::span<const std::byte> message) override {
    check(message.size(), all_.size());
    std::ranges::copy(message, all_.begin());
  }
  void down(std::size_t, Bytes& out) const override { out.insert(out.end(), all_.begin(), all_.end()); }
  [[nodiscard]] bool tells_all_the_same() const noexcept override { return true; }

 private:
  static void check(std::size_t bytes, std::size_t expected) {
    if (bytes != expected) throw group::malformed_round(fmt::format("{} bytes instead of {}", bytes, expected));
  }
  [[nodiscard]] HostTree tree() const noexcept { return {static_cast<int>(hosts_.members.size())}; }

  const Hosts& hosts_;
  std::vector<std::span<const std::byte>> parts_;  // the records of this host, and those of the hosts below
  std::size_t record_bytes_;
  std::span<std::byte> all_;
};

}  // namespace

void HostsGroup::do_all_gather(std::span<const std::byte> mine, std::span<std::byte> all, const WaitOptions& options) {
  const auto phase = in_phase(options);
  if (!has_other_hosts()) {
    ++round_;
    progress();
    locally(-1, [&] { local().all_gather(mine, all, later(options)); });
    return;
  }
  GatherFold fold(*hosts_, mine.size(), all);
  const auto message = run_round(mine, RoundHead::Kind::all_gather, fold, options);
  if (rank() == hosts_->leader(hosts_->mine)) return;
  group::or_blame(*this, hosts_->leader(hosts_->mine),
                  [&] { fold.take_above(std::span(*message).subspan(sizeof(RoundHead))); });
}

std::vector<std::byte> HostsGroup::do_fold(std::span<const std::byte> mine, group::HostFold& fold,
                                           const WaitOptions& options) {
  const auto phase = in_phase(options);
  const auto message = run_round(mine, RoundHead::Kind::fold, fold, options);
  return {message->begin() + sizeof(RoundHead), message->end()};
}

std::shared_ptr<const std::vector<std::byte>> HostsGroup::run_round(std::span<const std::byte> mine,
                                                                    RoundHead::Kind kind, group::HostFold& fold,
                                                                    const WaitOptions& options) {
  ++round_;
  progress();
  const RoundHead head{round_, static_cast<std::uint32_t>(mine.size()), kind};
  const std::vector<int>& here = hosts_->here();
  std::vector<std::byte> records(mine.begin(), mine.end());
  records.resize(mine.size() * here.size());
  // Other hosts wait for the result of this.
  if (!is_alone_here())
    group::or_fail(*this, [&] { locally(-1, [&] { local().all_gather(mine, records, later(options)); }); });
  const int leader = hosts_->leader(hosts_->mine);
  const int levels = host_tree().height(0);
  std::shared_ptr<const std::vector<std::byte>> answer;
  if (rank() == leader) {
    answer = fold_hosts(records, head, fold, options);
    if (!is_alone_here()) locally(-1, [&] { shared()->give_answer(*answer, later(options, 2 * levels * wait_step)); });
  } else {
    // Step 4.
    const WaitOptions wait = later(options, (2 * levels + 1) * wait_step);
    answer = std::make_shared<const std::vector<std::byte>>(
        locally(leader, [&] { return shared()->take_answer(place_of(leader), longest_of_round(), wait); }));
    check_round(leader, *answer, head, options);
  }
  end_round();
  return answer;
}

void HostsGroup::check_round(int from, std::span<const std::byte> message, const RoundHead& own,
                             const WaitOptions& options) {
  RoundHead theirs;
  if (message.size() >= sizeof theirs) std::memcpy(&theirs, message.data(), sizeof theirs);
  if (message.size() >= sizeof theirs && theirs == own) return;
  const auto text = [](const RoundHead& head) {
    return fmt::format("round {}{} with records of {} bytes", head.round,
                       head.kind == RoundHead::Kind::fold ? " (agreement)" : "", head.record_bytes);
  };
  group::fail(*this,
              Error(ErrorKind::rank_mismatch,
                    fmt::format("the ranks are in different calls: in {} rank {} is in {}, and rank {} in {}",
                                in_quotes(options.phase), number_of(rank()), text(own), number_of(from), text(theirs)),
                    {.rank = number_of(from)}));
}

std::shared_ptr<const std::vector<std::byte>> HostsGroup::fold_hosts(std::span<const std::byte> here,
                                                                     const RoundHead& head, group::HostFold& fold,
                                                                     const WaitOptions& options) {
  const HostTree tree = host_tree();
  const auto message = [&](auto&& contents) {
    const auto bytes = std::make_shared<std::vector<std::byte>>(sizeof head);
    std::memcpy(bytes->data(), &head, sizeof head);
    group::or_fail(*this, [&] { contents(*bytes); });
    return bytes;
  };
  const auto take = [&](int from, MessageTag tag, milliseconds grace) {
    std::vector<std::byte> bytes = take_message(from, this->tag(tag), longest_of_round(), options, grace);
    check_round(from, bytes, head, options);
    return bytes;
  };
  const auto give = [&](int to, MessageTag tag, const std::shared_ptr<std::vector<std::byte>>& bytes) {
    or_fail(to, options, [&] { post(to, this->tag(tag), *bytes, bytes); });
  };
  const std::vector<int> children = tree.children(hosts_->mine);
  // Step 2.
  group::or_fail(*this, [&] { fold.begin(hosts_->here(), here); });
  std::vector<std::vector<std::byte>> below;
  for (const int child : children) {
    const int from = hosts_->leader(child);
    below.push_back(take(from, MessageTag::up, tree.height(hosts_->mine) * wait_step));
    group::or_blame(*this, from, [&] { fold.take_below(std::span(below.back()).subspan(sizeof head)); });
  }
  const auto up = message([&](std::vector<std::byte>& out) { fold.up(out); });
  // Step 3.
  std::vector<std::byte> above;
  if (hosts_->mine != 0) {
    const int parent = hosts_->leader(tree.parent(hosts_->mine));
    give(parent, MessageTag::up, up);
    above = take(parent, MessageTag::down, (tree.height(0) + tree.depth(hosts_->mine)) * wait_step);
    group::or_blame(*this, parent, [&] { fold.take_above(std::span(above).subspan(sizeof head)); });
  }
  const auto down = [&](std::size_t child) {
    return message([&](std::vector<std::byte>& out) { fold.down(child, out); });
  };
  const auto own = down(group::HostFold::own_host);
  for (std::size_t child = 0; child < children.size(); ++child)
    give(hosts_->leader(children[child]), MessageTag::down, fold.tells_all_the_same() ? own : down(child));
  return own;
}

std::vector<std::byte> HostsGroup::take_message(int from, int tag, std::uint64_t most, const WaitOptions& options,
                                                milliseconds grace) {
  return or_fail(from, options, [&] {
    std::unique_ptr<ArrivedMessage> found;
    const std::array<int, 1> on{from};
    // `wait` evaluates its condition again after it was true.
    wait([&] { return found || (found = transport().find(number_of(from), tag)); }, {}, on, options, grace);
    const std::size_t length = found->bytes();
    if (length > most) group::fail_on_message(*this, from, length, most);
    const auto bytes = std::make_shared<std::vector<std::byte>>(length);
    PendingTransfer pending = found->receive(*bytes, bytes);
    // The sender may have left the group since. The rest of the message arrives when the sender calls the library next.
    wait([&] { return pending.test(); }, {}, on, options, grace, true);
    return std::move(*bytes);
  });
}

std::shared_ptr<std::atomic<std::uint64_t>> HostsGroup::untaken(int to, int tag) {
  std::shared_ptr<std::atomic<std::uint64_t>>& count = untaken_[{to, tag}];
  if (!count) count = std::make_shared<std::atomic<std::uint64_t>>(0);
  return count;
}

bool HostsGroup::may_move() const noexcept {
  return !has_ended_.load() && (!has_other_hosts() || context_->may_call());
}

void HostsGroup::forward_packets() {
  const group::GroupLock use(*this);
  if (!Forwarding::is_useful(*hosts_)) return;
  forwarding_ = std::make_unique<Forwarding>(
      hosts_, rank(), [this](int to, const auto& head, auto packet) { return send_step(to, head, packet); },
      [this](int from, const auto& place) { return receive_step(from, place); });
  mail().keep_stepping();
}

std::size_t HostsGroup::longest_step() const noexcept {
  // A packet of this length and its header fit into a TCP message that is sent eagerly.
  return group::BaseGroup::longest_packet() - sizeof(group::PacketHead);
}

std::size_t HostsGroup::longest_packet() const noexcept {
  return longest_step() - (forwarding_ ? sizeof(Forwarding::Route) : 0);
}

std::size_t HostsGroup::longest_piece(int to) const {
  if (forwarding_) return longest_packet();
  if (hosts_->is_here(to)) return local().longest_piece(place_of(to));
  const auto found = piece_lengths_.find(to);
  return found == piece_lengths_.end() ? long_piece : found->second.longest();
}

bool HostsGroup::packets_have_left(int to) {
  // If packets are forwarded, this rank keeps calling the library.
  if (forwarding_ || hosts_->is_here(to)) return true;
  return untaken(to, tag(MessageTag::long_mail))->load() == 0 && transport().has_left(number_of(to));
}

bool HostsGroup::do_try_send(int to, const group::PacketHead& head, std::span<const std::byte> packet) {
  return forwarding_ ? forwarding_->send(to, head, packet) : send_step(to, head, packet);
}

bool HostsGroup::send_step(int to, const group::PacketHead& head, std::span<const std::byte> packet) {
  if (hosts_->is_here(to)) return locally(to, [&] { return local().try_send(place_of(to), head, packet); });
  // Long packets must not delay short ones, which control the communication.
  const bool is_long = packet.size() > longest_step();
  const int tag = this->tag(is_long ? MessageTag::long_mail : MessageTag::mail);
  const auto untaken = this->untaken(to, tag);
  const std::uint64_t waiting = untaken->load();
  if (waiting > most_untaken_packets - packet.size()) return false;
  if (transport().agrees_on_long_messages() && packet.size() >= short_piece) {
    const std::uint64_t all = this->untaken(to, this->tag(MessageTag::mail))->load() +
                              this->untaken(to, this->tag(MessageTag::long_mail))->load();
    piece_lengths_[to].before_sending(packet.size(), all, std::chrono::steady_clock::now());
  }
  auto copy = std::make_shared<Untaken>(*packet_memory_, head.size(), packet.size(), untaken);
  std::memcpy(copy->bytes.data(), head.data(), head.size());
  if (!packet.empty()) std::memcpy(copy->bytes.data() + head.size(), packet.data(), packet.size());
  towards(to, [&] { post(to, tag, copy->bytes, copy, is_long ? SendEnd::sent : SendEnd::taken); });
  progress();
  return true;
}

bool HostsGroup::do_collect_packets(std::vector<int>& from) {
  if (!forwarding_) {
    collect_steps(from);
    return false;
  }
  std::vector<int> previous;
  collect_steps(previous);
  for (const int rank : previous) group::or_blame(*this, rank, [&] { forwarding_->collect(rank); });
  forwarding_->append_senders(from);
  return forwarding_->pass_on();
}

void HostsGroup::collect_steps(std::vector<int>& from) {
  for (const MessageTag kind : {MessageTag::mail, MessageTag::long_mail}) {
    const std::uint64_t most = kind == MessageTag::mail ? longest_step() : long_piece;
    for (std::size_t count = 0; count < most_collected; ++count) {
      const std::unique_ptr<ArrivedMessage> found = transport().find(any_rank, tag(kind));
      if (!found) break;
      const int sender = rank_of(found->from());
      if (sender < 0) continue;
      const std::size_t length = found->bytes();
      if (length < sizeof(group::PacketHead) || length > sizeof(group::PacketHead) + most)
        group::fail_on_message(*this, sender, length, most);
      const std::shared_ptr<std::byte> memory = memory_for_packet(*packet_memory_, length);
      const std::span<std::byte> bytes(memory.get(), length);
      packets_[{sender, tag(kind)}].push_back({memory, bytes, found->receive(bytes, memory)});
    }
  }
  for (const int here : hosts_->here())
    if (here != rank()) from.push_back(here);
  for (const auto& [key, coming] : packets_)
    if (!coming.empty() && (from.empty() || from.back() != key.first)) from.push_back(key.first);
}

bool HostsGroup::do_try_receive(int from, const group::PacketPlace& place) {
  return forwarding_ ? forwarding_->receive(from, place) : receive_step(from, place);
}

bool HostsGroup::receive_step(int from, const group::PacketPlace& place) {
  if (hosts_->is_here(from)) return locally(from, [&] { return local().try_receive(place_of(from), place); });
  return take_packet(from, MessageTag::mail, place) || take_packet(from, MessageTag::long_mail, place);
}

bool HostsGroup::take_packet(int from, MessageTag kind, const group::PacketPlace& place) {
  const auto found = packets_.find({from, tag(kind)});
  if (found == packets_.end() || found->second.empty()) return false;
  std::deque<Coming>& coming = found->second;
  const WaitOptions options{.timeout = {}, .stop = {}, .phase = phase_.load()};
  if (!or_fail(from, options, [&] { return coming.front().pending.test(); })) return false;
  const Coming next = std::move(coming.front());
  coming.pop_front();
  group::PacketHead head;
  std::memcpy(head.data(), next.bytes.data(), head.size());
  const std::span<const std::byte> packet = next.bytes.subspan(head.size());
  const std::span<std::byte> room = place(head, packet.size());
  if (!packet.empty()) std::memcpy(room.data(), packet.data(), packet.size());
  progress();
  return true;
}

void HostsGroup::do_wait_for_packets(const std::function<bool()>& done, std::span<const int> on,
                                     const WaitOptions& options) {
  const auto phase = in_phase(options);
  if (forwarding_ || !std::ranges::all_of(on, [&](int rank) { return hosts_->is_here(rank); })) {
    // The ranks of a gateway's host see that it is stopped. Their error comes first.
    wait(done, {}, on, options, forwarding_ ? wait_step : milliseconds(0));
    return;
  }
  std::vector<int> places;
  for (const int rank : on) places.push_back(place_of(rank));
  locally(on.empty() ? -1 : on.front(), [&] { local().wait_for_packets(done, places, later(options)); });
}

namespace {

/// The proposal of a rank for the number of new groups, and their nonce.
struct NewGroups {
  std::int32_t number = 0;
  Group::Nonce nonce{};
};

/// The highest number and the nonce of the first rank.
class NewGroupsFold final : public group::ValueFold<NewGroups> {
 protected:
  void add(NewGroups& sum, const NewGroups& value) override { sum.number = std::max(sum.number, value.number); }
};

}  // namespace

std::pair<int, Group::Nonce> HostsGroup::agree_on_number(bool is_member, const Nonce& nonce,
                                                         const WaitOptions& options) {
  NewGroups mine{.nonce = nonce};
  for (;;) {
    mine.number = is_member ? context_->next_number() : 0;
    NewGroupsFold fold;
    const auto answer = do_fold(std::as_bytes(std::span(&mine, 1)), fold, options);
    const NewGroups agreed = group::or_blame(*this, group::first_here, [&] { return NewGroupsFold::read(answer); });
    // Another thread of a member may have made a group with that number in the meantime.
    const bool is_taken = is_member && agreed.number != mine.number && !context_->take_number(agreed.number);
    if (!any(is_taken, options)) return {agreed.number, agreed.nonce};
  }
}

std::shared_ptr<const Hosts> HostsGroup::hosts_of(const SplitPart& part) const {
  std::vector<int> keys;
  keys.reserve(part.members.size());
  for (const int member : part.members) keys.push_back(host_of(member));
  return std::make_shared<const Hosts>(keys, part.position);
}

std::shared_ptr<group::BaseGroup> HostsGroup::make_part(const SplitPart& part, Tie tie, const WaitOptions& options) {
  std::vector<int> here;  // the positions of the members on this host
  HostsMembership made_of;
  Nonce own_nonce;
  together(options, [&] {
    os::random_bytes(own_nonce);
    for (const int member : part.members)
      if (hosts_->is_here(member)) here.push_back(place_of(member));
    if (part.position < 0) return;
    made_of.ranks = group::RankTable::part(ranks(), part.members);
    made_of.hosts = made_of.ranks == ranks() ? hosts_ : hosts_of(part);
  });
  const auto [number, nonce] = agree_on_number(part.position >= 0, own_nonce, options);
  std::shared_ptr<group::BaseGroup> made;
  together(options, [&, number = number, nonce = nonce] {
    // This call is collective on each host. It comes first, so that a rank without memory does not skip it.
    made_of.local = locally(-1, [&]() -> std::shared_ptr<Group> {
      if (tie == Tie::companion) return local().companion(later(options));
      return local().split(here, later(options));
    });
    if (part.position < 0) return;
    if ((number + 2) * tags_a_group > transport().most_tag())
      throw Error(
          ErrorKind::unsupported,
          fmt::format(
              "group: {} groups of one parent are more than {} has tags for. Release groups that are not needed",
              number, transport().name()));
    if (here.size() == 1) {
      made_of.local = single_group();
      made_of.local->set_timeout(timeout());
    }
    // All parts of one call have the same number and nonce. They have no rank in common.
    made_of.nonce = nonce;
    const auto first = std::as_bytes(std::span(&part.members.front(), 1));
    for (std::size_t i = 0; i < first.size(); ++i) made_of.nonce[i] ^= first[i];
    made = std::make_shared<HostsGroup>(context_, number, std::move(made_of), part.position, timeout(),
                                        tie == Tie::companion ? health_ : nullptr);
  });
  return made;
}

std::shared_ptr<Group> make_group(const std::shared_ptr<Context>& context, milliseconds timeout, const char* phase,
                                  std::uint64_t open_files_left) {
  keep(context);
  try {
    HostsMembership members(meet(context->transport(), timeout, open_files_left));
    context->introduce(members);
    auto group = std::make_shared<HostsGroup>(context, 0, std::move(members), context->rank(), timeout);
    group->barrier({.timeout = {}, .stop = {}, .phase = phase});
    return group;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::version) context->has_failed();
    context->retire();
    throw;
  }
}

}  // namespace muster::multihost
