// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/transfer_method.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <bit>
#include <set>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/os/process.hpp"

namespace muster::cuda {
namespace {

bool can_go_by_ipc(const DeviceFacts& sender) {
  return sender.sees_first && sender.is_exportable;
}

/// Returns whether the senders and the root can be ranks of one NCCL communicator, which requires one device per rank.
bool can_go_by_nccl(const DeviceFacts& first, std::span<const DeviceFacts> facts,
                    std::span<const std::size_t> senders) {
  std::set<std::uint64_t> devices{first.device};
  if (!first.has_nccl || first.device == 0) return false;
  return std::ranges::all_of(senders, [&](std::size_t at) {
    const DeviceFacts& sender = facts[at];
    return sender.has_nccl && sender.is_contiguous && sender.device != 0 && devices.insert(sender.device).second;
  });
}

[[noreturn]] void refuse_forced(TransferMethod way, std::size_t position) {
  const char* const why = way == TransferMethod::ipc
                              ? "it needs ranks of one host, in separate processes, and contiguous tensors "
                                "from cudaMalloc (memory pools cannot be exported)"
                              : "it needs NCCL (libnccl.so.2) on all ranks, contiguous tensors of one "
                                "device per rank, a different device for each rank, and one on the root";
  throw Error(ErrorKind::unsupported,
              fmt::format("MUSTER_DEVICE_TRANSPORT is {}, which the rank at index {} of the list "
                          "cannot use: {}. Unset it, or set it to staging",
                          way_name(way), position, why));
}

}  // namespace

std::string_view way_name(TransferMethod way) noexcept {
  constexpr std::array<std::string_view, 4> names = {"nothing", "staging", "ipc", "nccl"};
  const auto number = static_cast<std::size_t>(way);
  return number < names.size() ? names[number] : "unknown";
}

void put_facts(const DeviceFacts& facts, gather::ExchangeRecord& record) noexcept {
  record.device = std::bit_cast<std::uint64_t>(facts);
}

DeviceFacts get_facts(const gather::ExchangeRecord& record) noexcept {
  return std::bit_cast<DeviceFacts>(record.device);
}

std::vector<TransferMethod> choose_ways(std::span<const DeviceFacts> facts) {
  std::vector<TransferMethod> ways(facts.size(), TransferMethod::nothing);
  const auto known = std::ranges::find_if(facts, [](const DeviceFacts& rank) { return rank.is_known; });
  if (known == facts.end()) return ways;
  for (std::size_t at = 0; at < facts.size(); ++at) {
    if (!facts[at].is_known) continue;
    if (facts[at].destination != known->destination)
      throw Error(ErrorKind::rank_mismatch,
                  "GatherOptions::devices differs between the ranks of the list: their tensors have different "
                  "destinations. Set it to the same value on all of them");
    if (facts[at].forced != known->forced)
      throw Error(
          ErrorKind::rank_mismatch,
          "MUSTER_DEVICE_TRANSPORT differs between the ranks of the list. Set it to the same value on all of them");
  }
  std::vector<std::size_t> senders;
  for (std::size_t at = 1; at < facts.size(); ++at)
    if (facts[at].has_tensors) senders.push_back(at);
  for (const std::size_t at : senders) ways[at] = TransferMethod::staging;
  const TransferMethod forced = known->forced;
  if (known->destination == Destination::host || forced == TransferMethod::staging) return ways;
  if (forced == TransferMethod::ipc) {
    for (const std::size_t at : senders) {
      if (!can_go_by_ipc(facts[at])) refuse_forced(TransferMethod::ipc, at);
      ways[at] = TransferMethod::ipc;
    }
    return ways;
  }
  std::vector<std::size_t> remote;
  for (const std::size_t at : senders) {
    if (forced != TransferMethod::nccl && facts[at].sees_first) {
      if (can_go_by_ipc(facts[at])) ways[at] = TransferMethod::ipc;
    } else {
      remote.push_back(at);
    }
  }
  if (remote.empty()) return ways;
  if (can_go_by_nccl(facts.front(), facts, remote)) {
    for (const std::size_t at : remote) ways[at] = TransferMethod::nccl;
  } else if (forced == TransferMethod::nccl) {
    refuse_forced(TransferMethod::nccl, remote.front());
  }
  return ways;
}

TransferMethod forced_way() {
  const auto name = os::environment("MUSTER_DEVICE_TRANSPORT");
  if (!name) return TransferMethod::nothing;
  for (const TransferMethod way : {TransferMethod::staging, TransferMethod::ipc, TransferMethod::nccl})
    if (*name == way_name(way)) return way;
  throw Error(ErrorKind::invalid_argument,
              "MUSTER_DEVICE_TRANSPORT is " + in_quotes(*name) + ": it must be staging, ipc or nccl");
}

}  // namespace muster::cuda
