// SPDX-License-Identifier: Apache-2.0
#include "src/device/nccl_backend.hpp"
#include "src/os/clock.hpp"

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <exception>
#include <string>
#include <thread>
#include <utility>

#include "muster/error.hpp"
#include "src/sync/failing.hpp"

namespace muster::cuda {

using collectives::Card;

namespace {

/// The maximum number of devices per process.
constexpr std::size_t most_devices = 64;
/// How long the end of a group waits for the other ranks to end it.
constexpr std::chrono::seconds longest_end{1};

/// The record of a rank when devices connect.
struct Introduction {
  NcclId id{};  // of rank 0
  std::array<std::uint64_t, most_devices> devices{};
};
static_assert(sizeof(Introduction) <= SyncGroup::max_record);

}  // namespace

// Step 1.

std::uint64_t NcclCalls::identity_of(int device) {
  std::uint64_t& identity = identities_[device];
  if (identity == 0) identity = device_identity(device);
  return identity;
}

collectives::Place NcclCalls::begin(std::span<const Device> devices) {
  lanes_.clear();
  is_captured_ = false;
  if (devices.size() > most_devices)
    throw Error(ErrorKind::argument,
                fmt::format("a rank has at most {} devices in one call, not {}", most_devices, devices.size()));
  std::vector<std::uint64_t> identities;
  for (const Device& device : devices) {
    if (device.is_host()) throw Error(ErrorKind::argument, "a tensor is in host memory, and all have to be on devices");
    if (std::ranges::find(lanes_, device.index, &Lane::device) != lanes_.end())
      throw Error(ErrorKind::argument, fmt::format("two tensors are on {}: one on each device", to_string(device)));
    const Current current(device.index);
    const CallersStream stream = look_at_callers_stream(device.index);
    is_captured_ = is_captured_ || stream.is_captured;
    lanes_.push_back({device.index, stream.handle});
    identities.push_back(identity_of(device.index));
  }
  if (is_captured_ && lanes_.size() > 1)
    throw Error(
        ErrorKind::unsupported,
        "a call for several devices of a rank cannot be captured into a graph: NVIDIA's documentation says that "
        "launching one may never return");
  const std::uint64_t all = XXH3_64bits(identities.data(), identities.size() * sizeof(std::uint64_t));
  return {.devices = all, .count = static_cast<std::uint32_t>(lanes_.size()), .is_captured = is_captured_};
}

const NcclCalls::Lane& NcclCalls::lane_of(const Device& device) const {
  const auto found = std::ranges::find(lanes_, device.index, &Lane::device);
  if (device.is_host() || found == lanes_.end())
    throw Error(ErrorKind::argument,
                fmt::format("a tensor is on {}, and another one of the same call on cuda:{}: all have to be there",
                            to_string(device), lanes_.front().device));
  return *found;
}

void NcclCalls::follow(const Lane& lane) {
  const auto last = last_.find(lane.device);
  if (is_captured_ || last == last_.end()) return;
  const Current current(lane.device);
  check(driver().stream_wait_event(lane.stream, last->second.handle(), 0), "queueing behind the group's last call");
}

void NcclCalls::note_last(const Lane& lane) {
  if (is_captured_) return;
  const Current current(lane.device);
  last_.try_emplace(lane.device, lane.device).first->second.record(lane.stream);
}

// Step 2.

void NcclCalls::open(const Card& card, const collectives::Opened& opened, const WaitOptions& options) {
  Card mine = card;
  mine.on_devices.bytes = card.bytes;
  mine.bytes = mine.largest = 0;
  const std::vector<collectives::Room> nothing(static_cast<std::size_t>(group_.size()));
  const auto then = [&](std::span<const Card> cards) {
    cards_.assign(cards.begin(), cards.end());
    for (Card& each : cards_) each.bytes = each.on_devices.bytes;
    opened(cards_);
    // All ranks come to the same result.
    if (is_captured_ && met() == nullptr)
      throw Error(ErrorKind::argument,
                  "the stream that is named is being captured into a graph, and NCCL cannot meet in one: make the same "
                  "call on these devices before the capture begins");
  };
  round_.all_gather(mine, then, {}, nothing, options);
}

// Step 3.

std::vector<int> NcclCalls::others() const {
  std::vector<int> ranks(group_.all().begin(), group_.all().end());
  std::erase(ranks, group_.rank());
  return ranks;
}

std::vector<std::uint64_t> NcclCalls::devices_of_all() const {
  std::vector<std::uint64_t> devices;
  for (const Card& card : cards_) devices.push_back(card.on_devices.devices);
  return devices;
}

NcclCalls::Communicators* NcclCalls::met() {
  const auto found = met_.find(devices_of_all());
  return found == met_.end() ? nullptr : &found->second;
}

NcclCalls::Communicators& NcclCalls::meet(const WaitOptions& options) {
  if (Communicators* const known = met()) return *known;
  Introduction mine;
  group_.together(options, [&] {
    std::string reason;
    if (find_nccl(&reason) == nullptr) throw Error(ErrorKind::unsupported, reason);
    if (group_.rank() == 0) mine.id = make_nccl_id();
  });
  for (std::size_t i = 0; i < lanes_.size(); ++i) mine.devices[i] = identity_of(lanes_[i].device);
  std::vector<Introduction> all(cards_.size());
  group_.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)), options);
  std::map<std::uint64_t, int> owners;
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      const auto [owner, is_first] = owners.try_emplace(all[rank].devices[i], static_cast<int>(rank));
      if (!is_first)
        throw Error(
            ErrorKind::unsupported,
            fmt::format("{} and {} are on one device, and NCCL wants one for each: give each rank its own "
                        "(CUDA_VISIBLE_DEVICES), or copy the tensors to the host (copy_to_host)",
                        sync::name_of(group_.info(owner->second)), sync::name_of(group_.info(static_cast<int>(rank)))));
    }
  Communicators communicators;
  const auto work = [&] {
    const auto begin = [&] {
      for (std::size_t i = 0; i < lanes_.size(); ++i) {
        const Current current(lanes_[i].device);
        communicators.push_back(std::make_unique<Communicator>(
            static_cast<int>(all.size() * lanes_.size()),
            static_cast<int>(static_cast<std::size_t>(group_.rank()) * lanes_.size() + i), all[0].id));
      }
    };
    // A single device needs no batch. NCCL would treat a batch as a different kind of call.
    if (lanes_.size() == 1)
      begin();
    else
      Communicator::batch(begin);
    wait_until_ready(communicators, "NCCL to meet the other ranks", options);
  };
  by_nccl_or_fail(group_, others(), options, work, [&] { communicators.clear(); });
  return met_[devices_of_all()] = std::move(communicators);
}

void NcclCalls::wait_until_ready(const Communicators& communicators, const char* what, const WaitOptions& options) {
  const auto are_ready = [&] {
    bool all = true;
    for (const auto& each : communicators) all = each->is_ready() && all;
    return all;
  };
  wait_for_device(group_, are_ready, what, options, others());
}

// Step 4.

void NcclCalls::put(const WaitOptions& options, const Add& add) {
  Communicators& communicators = meet(options);
  const auto work = [&] {
    for (const Lane& lane : lanes_) follow(lane);
    Communicator::batch([&] {
      for (std::size_t i = 0; i < lanes_.size(); ++i) {
        const Current current(lanes_[i].device);
        add(i, *communicators[i], lanes_[i].stream);
      }
    });
    wait_until_ready(communicators, "NCCL to take the call", options);
    for (const Lane& lane : lanes_) note_last(lane);
  };
  by_nccl_or_fail(group_, others(), options, work, [&] { abort(); });
}

// The end.

bool NcclCalls::are_ready() const {
  bool all = true;
  for (const auto& [devices, communicators] : met_)
    for (const auto& each : communicators) all = each->is_ready() && all;
  return all;
}

bool NcclCalls::have_ended() const {
  return std::ranges::all_of(last_, [](const auto& each) { return each.second.has_passed(); });
}

void NcclCalls::wait(const WaitOptions& options) {
  const auto work = [&] {
    // A failure between the devices does not end the work. NCCL reports it.
    wait_for_device(
        group_, [&] { return are_ready() && have_ended(); }, "its devices to do what the group's calls have asked",
        options, others());
  };
  by_nccl_or_fail(group_, others(), options, work, [&] { abort(); });
}

bool NcclCalls::try_close() {
  using Clock = os::Clock;
  const std::vector<int> ranks = others();
  // Polls with short sleeps until `done` is true, or can no longer become true.
  const auto comes = [&](const auto& done, Clock::duration longest) {
    const Clock::time_point until = Clock::now() + longest;
    while (!done()) {
      if (group_.failure() || Clock::now() >= until) return false;
      if (std::ranges::any_of(ranks, [&](int rank) { return group_.liveness(rank)->is_dead(); })) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  };
  const auto with_all = [&](const auto& use) {
    for (const auto& [devices, communicators] : met_)
      for (const auto& each : communicators) use(*each);
  };
  if (!comes([&] { return are_ready() && have_ended(); }, group_.timeout())) return false;
  with_all([](Communicator& each) { each.begin_close(); });
  if (!comes([&] { return are_ready(); }, longest_end)) return false;
  with_all([](Communicator& each) { each.note_closed(); });
  return true;
}

NcclCalls::~NcclCalls() {
  try {
    // A forked child owns no communicator.
    if (!met_.empty() && find_driver() != nullptr) (void)try_close();
  } catch (const std::exception&) {
    // A device or NCCL has failed. Communicators that have not been closed are aborted.
  }
}

}  // namespace muster::cuda
