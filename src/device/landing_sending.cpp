// SPDX-License-Identifier: Apache-2.0
// A sender's side of a landing on the first rank's device.

#define XXH_INLINE_ALL
#include <fmt/core.h>
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <thread>

#include "src/device/landing.hpp"
#include "src/device/staging.hpp"
#include "src/gather/opening.hpp"

namespace muster::cuda {
namespace {

constexpr const char* offer_phase = "gather: offering device memory";

void send_message(const gather::Call& call, OfferHeader header, std::span<const Export> exports,
                  std::span<const std::uint64_t> gone, std::span<const std::byte> body) {
  header.exchange = call.number;
  header.exports = static_cast<std::uint32_t>(exports.size());
  header.gone = static_cast<std::uint32_t>(gone.size());
  header.body_bytes = body.size();
  header.body_hash = XXH3_64bits(body.data(), body.size());
  std::vector<std::byte> message;
  append(message, header);
  for (const Export& exported : exports) append(message, exported);
  for (const std::uint64_t buffer : gone) append(message, buffer);
  message.insert(message.end(), body.begin(), body.end());
  call.group->send(call.first(), message, call.wait(offer_phase), sync::Subject::exchange);
}

/// The CPU waits for what the caller has queued: whoever copies next is in another process.
void wait_for_caller(const gather::Call& call, const std::set<int>& devices) {
  for (const int device : devices) {
    Event event(device);
    {
      const Current current(device);
      event.record(callers_stream(device));
    }
    wait_for_device(
        *call.group, [&] { return event.has_passed(); },
        fmt::format("the work that its caller has queued on cuda:{}", device), call.wait(offer_phase));
  }
}

/// Sends what `make` says; where that fails, that it did: the first rank waits for a message.
void send_or_fail(const gather::Call& call, const auto& make) {
  try {
    make();
  } catch (const std::exception&) {
    if (!call.group->failure()) send_message(call, {.has_failed = 1}, {}, {}, {});
    throw;
  }
}

}  // namespace

void by_nccl_or_fail(const gather::Call& call, std::span<const int> members, NcclLists::Entry& entry,
                     const std::function<void()>& work) {
  SyncGroup& group = *call.group;
  try {
    // What the group has failed with is thrown, also where it is NCCL's way to say that another rank has heard of it.
    const std::optional<Error> error = gather::attempt(group, work);
    if (!error) return;
    // NCCL often sees a death before the group does, which has the better words.
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    group.wait_until(
        [&] { return std::chrono::steady_clock::now() >= until; },
        [](std::chrono::nanoseconds longest) {
          std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(longest, std::chrono::milliseconds(10)));
        },
        members, call.wait("gather: NCCL has failed"));
    sync::fail(group, sync::error_of(group.info(group.rank()), error->kind(), error->what()));
  } catch (const Error&) {
    // A stream that waits for a rank that is gone would never be idle: its communicator goes first.
    entry.communicator.reset();
    throw;
  }
}

bool DeviceSending::by_ipc() {
  std::vector<Export> exports;
  send_or_fail(call_, [&] {
    std::map<std::uint64_t, std::uint32_t> numbers;  // by buffer
    std::set<int> devices;
    const std::vector<std::uint64_t> gone = state_.exports.take_gone(call_.first());
    const std::vector<std::byte> body = core::encode_descriptor(*call_.value, [&](const Tensor& tensor) {
      if (tensor.device().is_host() || tensor.nbytes() == 0) return std::optional<core::Place>();
      devices.insert(tensor.device().index);
      const Exports::Found found = state_.exports.find(tensor.view());
      const auto [number, is_new] =
          numbers.try_emplace(found.exported.buffer, static_cast<std::uint32_t>(exports.size() + 1));
      if (is_new) exports.push_back(found.exported);
      return std::optional(core::Place{number->second, found.offset});
    });
    if (exports.size() > most_exports)
      throw Error(ErrorKind::argument,
                  fmt::format("the tensors are in {} allocations, more than can be offered by CUDA "
                              "IPC: set MUSTER_DEVICE_WAY to staging",
                              exports.size()));
    wait_for_caller(call_, devices);
    send_message(call_, {}, exports, gone, body);
  });
  // Whatever it answers it may have some of them open.
  for (const Export& exported : exports) state_.exports.note_told(call_.first(), exported.buffer);
  return receive_answer(call_).verdict != Verdict::stage;
}

void DeviceSending::by_nccl(std::span<const int> members) {
  std::vector<const Tensor*> tensors;
  NcclLists::Entry& entry = state_.nccl.of(members);
  send_or_fail(call_, [&] {
    const std::vector<std::byte> body = core::encode_descriptor(*call_.value, [&](const Tensor& tensor) {
      if (!tensor.device().is_host() && tensor.nbytes() != 0) tensors.push_back(&tensor);
      return std::optional<core::Place>();
    });
    send_message(call_, {.communicator = entry.communicator ? entry.number : 0}, {}, {}, body);
  });
  const Answer answer = receive_answer(call_);
  if (answer.verdict != Verdict::taken || tensors.empty()) return;
  by_nccl_or_fail(call_, members.first(1), entry, [&] { send_by_nccl(tensors, entry, answer, members); });
}

void DeviceSending::send_by_nccl(std::span<const Tensor* const> tensors, NcclLists::Entry& entry, const Answer& answer,
                                 std::span<const int> members) {
  const int device = tensors.front()->device().index;
  const Current current(device);
  CopyQueue& queue = state_.queue(device);
  const WaitOptions wait = call_.wait("gather: sending between devices");
  const auto ready = [&] { return entry.communicator->is_ready(); };
  if (answer.is_new != 0) {
    entry.communicator.reset();
    entry.communicator = std::make_unique<Communicator>(answer.size, answer.rank, answer.id);
    entry.number = answer.communicator;
    wait_for_device(*call_.group, ready, "NCCL to meet the other ranks", wait, members.first(1));
  }
  queue.follow_caller();
  for (std::size_t at = 0; at < tensors.size(); at += nccl_batch) {
    entry.communicator->batch([&] {
      for (std::size_t i = at; i < std::min(tensors.size(), at + nccl_batch); ++i)
        entry.communicator->send(device_pointer(tensors[i]->data()), tensors[i]->nbytes(), 0, queue.stream());
    });
    wait_for_device(*call_.group, ready, "NCCL to send", wait, members.first(1));
    queue.mark();
  }
  queue.finish(*call_.group, wait, {members.first(1), [&] { (void)ready(); }});
}

}  // namespace muster::cuda
