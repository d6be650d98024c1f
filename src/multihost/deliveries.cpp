// SPDX-License-Identifier: Apache-2.0
// Step numbers refer to the list in deliveries.hpp.

#include "src/multihost/deliveries.hpp"

#include <algorithm>
#include <utility>

#include "src/multihost/hosts.hpp"

namespace muster::multihost {
namespace {

using std::chrono::milliseconds;

// How long a delivery waits for a confirmation, if it was sent to several ranks and if it was sent to one. A waiting
// rank reads its messages every 60 ms.
constexpr milliseconds patience{150};
constexpr milliseconds patience_with_one{75};
// The maximum number of ranks of one host that a message is sent to.
constexpr std::size_t most_contacts = 4;

}  // namespace

RunningTime::Clock::duration RunningTime::turn() noexcept {
  const Clock::time_point now = Clock::now();
  const Clock::duration passed = std::min<Clock::duration>(now - std::exchange(last_, now), longest_turn);
  sum_ += passed;
  return passed;
}

Deliveries::Deliveries(int ranks, Tell tell)
    : tell_(std::move(tell)), is_lost_(static_cast<std::size_t>(ranks)), is_silent_(static_cast<std::size_t>(ranks)) {}

std::shared_ptr<const Delivery> Deliveries::begin(std::vector<int> contacts, const Control& control,
                                                  std::function<void(const Delivery&)> over) {
  const auto delivery = std::make_shared<Delivery>();
  delivery->contacts = std::move(contacts);
  delivery->control = control;
  delivery->control.serial = ++last_serial_;
  delivery->over = std::move(over);
  open_.push_back(delivery);
  // Step 1.
  send_further(*delivery);
  return delivery;
}

bool Deliveries::is_out(const Delivery& delivery, int contact) const {
  const auto at = static_cast<std::size_t>(contact);
  return is_lost_[at] || is_silent_[at] || std::ranges::find(delivery.refused, contact) != delivery.refused.end();
}

void Deliveries::send_further(Delivery& delivery) {
  const std::size_t begin = delivery.sent;
  const std::size_t end = std::min(begin == 0 ? 1 : most_contacts, delivery.contacts.size());
  if (begin >= end) {
    delivery.state = Delivery::State::failed;
    return;
  }
  delivery.sent = end;
  delivery.waited = {};
  for (std::size_t at = begin; at < end; ++at) {
    const int contact = delivery.contacts[at];
    try {
      if (!is_lost_[static_cast<std::size_t>(contact)]) tell_(contact, delivery.control);
    } catch (const std::exception&) {
      // This process cannot reach the rank. The rank itself may be healthy.
      delivery.refused.push_back(contact);
    }
  }
}

void Deliveries::confirm(const Control& control) {
  const auto found = std::ranges::find(open_, control.serial, [](const auto& one) { return one->control.serial; });
  if (found == open_.end()) return;
  Delivery& delivery = **found;
  if (control.has_left != 0) {
    delivery.refused.push_back(control.from);
    return;
  }
  if (control.is_decided != 0) delivery.decision = control.error.get();
  if (delivery.state == Delivery::State::open) delivery.state = Delivery::State::confirmed;
}

void Deliveries::advance() {
  const auto passed = time_.turn();
  // The copy is needed because the callbacks begin other deliveries.
  const std::vector<std::shared_ptr<Delivery>> all = open_;
  for (const std::shared_ptr<Delivery>& delivery : all) {
    const std::span<const int> tried(delivery->contacts.data(), delivery->sent);
    delivery->waited += passed;
    const bool has_more = delivery->sent < std::min(most_contacts, delivery->contacts.size());
    if (delivery->state == Delivery::State::open && !has_more && delivery->waited > patience)
      for (const int contact : tried) is_silent_[static_cast<std::size_t>(contact)] = true;
    if (delivery->state == Delivery::State::open &&
        ((has_more && delivery->waited > patience_with_one) ||
         std::ranges::all_of(tried, [&](int contact) { return is_out(*delivery, contact); })))
      send_further(*delivery);
  }
  std::erase_if(open_, [](const auto& one) { return one->state != Delivery::State::open; });
  for (const std::shared_ptr<Delivery>& delivery : all)
    if (delivery->state != Delivery::State::open && delivery->over) std::exchange(delivery->over, {})(*delivery);
}

std::shared_ptr<const Spread> Deliveries::spread(std::shared_ptr<const Contacts> contacts, const Control& control,
                                                 std::initializer_list<int> informed) {
  const auto spread = std::make_shared<Spread>();
  spread->has_had.resize(contacts->of_hosts.size());
  spread->contacts = std::move(contacts);
  spread->control = control;
  spread->has_had[static_cast<std::size_t>(spread->contacts->mine)] = true;
  for (const int host : informed)
    if (host >= 0) spread->has_had[static_cast<std::size_t>(host)] = true;
  pass_on(spread, spread->contacts->mine);
  return spread;
}

void Deliveries::pass_on(const std::shared_ptr<Spread>& spread, int host) {
  const HostTree tree{static_cast<int>(spread->contacts->of_hosts.size())};
  std::vector<int> next = tree.children(host);
  if (const int parent = tree.parent(host); parent >= 0) next.push_back(parent);
  for (const int other : next) {
    const auto at = static_cast<std::size_t>(other);
    if (spread->has_had[at]) continue;
    spread->has_had[at] = true;
    ++spread->open;
    begin(spread->contacts->of_hosts[at], spread->control, [this, spread, other](const Delivery& delivery) {
      --spread->open;
      // If a rank has already left a companion group, its host needs no notice of that group's failure.
      const bool is_needed = spread->control.kind == ControlKind::decision || delivery.refused.empty();
      // Step 2.
      if (delivery.state == Delivery::State::failed && is_needed) pass_on(spread, other);
    });
  }
}

}  // namespace muster::multihost
