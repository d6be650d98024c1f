// SPDX-License-Identifier: Apache-2.0
// A sender's side of a stream. Step numbers are those of stream.hpp.

#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "src/core/descriptor.hpp"
#include "src/gather/slicing.hpp"
#include "src/gather/stream.hpp"
#include "src/os/clock.hpp"

namespace muster::gather {
namespace {

using Clock = std::chrono::steady_clock;

Config tree_of(const std::vector<TensorSlice>& slices) {
  ConfigArray all;
  for (const TensorSlice& slice : slices) {
    ConfigArray extents;
    for (const std::int64_t extent : slice.whole.shape) extents.emplace_back(extent);
    all.push_back(
        ConfigArray{slice.path, static_cast<int>(slice.whole.dtype), std::move(extents), slice.first, slice.elements});
  }
  return all;
}

/// Returns the header as it is sent.
std::vector<std::byte> message_of(const PartHeader& header, const std::vector<TensorSlice>& slices) {
  std::vector<std::byte> message(sizeof header);
  std::memcpy(message.data(), &header, sizeof header);
  if (slices.empty()) return message;
  const auto tail = core::encode_descriptor(tree_of(slices), [](const Tensor&) { return std::nullopt; });
  message.insert(message.end(), tail.begin(), tail.end());
  return message;
}

}  // namespace

void StreamSending::run() {
  for (std::uint64_t layer = 0;; ++layer) {
    wait_for_credit();
    const std::optional<Config> config = call_.next_layer(layer);
    if (!config) {
      send_header({layer, 0, 0, {}}, {});
      return;
    }
    ++call_.report->layers;
    if (config->is_null()) {
      send_part(layer, 0, 1, nullptr, {});
      continue;
    }
    try {
      send_layer(layer, *config);
    } catch (const Error& error) {
      if (call_.companion->failure()) throw;
      throw error.with_context(fmt::format("layer {}", layer));
    }
  }
}

void StreamSending::send_layer(std::uint64_t layer, const Config& config) {
  const LayerParts parts(config, call_.part_bytes,
                         [this](const TensorView& tensor) { return call_.driver->moves(tensor); });
  if (parts.count() == 1) return send_part(layer, 0, 1, &config, {});
  for (std::uint32_t part = 0; part < parts.count(); ++part) {
    if (part != 0) wait_for_credit();
    std::vector<TensorSlice> slices;
    const Config tree = parts.make(part, &slices);
    send_part(layer, part, parts.count(), &tree, slices);
  }
}

void StreamSending::send_part(std::uint64_t layer, std::uint32_t part, std::uint32_t parts, const Config* value,
                              const std::vector<TensorSlice>& slices) {
  Call& call = part_call_ = call_.part_call(layer, part, value);
  const std::unique_ptr<SlotFiller> filler = call_.filler_of(call);
  call.filler = filler.get();
  std::optional<Config> staged;
  if (value != nullptr && filler == nullptr) staged = call_.staged(*value);
  if (staged) call.value = value = &*staged;
  PartHeader header{.layer = layer, .part = part, .parts = parts, .record = {}};
  header.record.has_value = value != nullptr;
  ++call_.report->parts;
  if (call_.part_sender != nullptr) return send_by_part_sender(header, slices, value);
  if (value == nullptr) {
    send_header(header, slices);
    under_way_.emplace_back();
    return;
  }
  transfer_ = call_.driver->begin(call);
  transfer_->offer(header.record);
  if (header.record.fresh_bytes > header.record.available_bytes)
    throw Error(
        ErrorKind::no_space,
        fmt::format("too little shared memory: needed {} bytes for a part, available {} ({}): lower "
                    "memory_budget, or give the job more memory",
                    header.record.fresh_bytes, header.record.available_bytes, os::to_string(header.record.limit)));
  send_header(header, slices);
  ExchangeReport moved;
  transfer_->move({}, moved);
  transfer_->commit();
  // Stored before anything else can fail, so that a failed stream withdraws its leases.
  under_way_.push_back(transfer_->obligations());
  // The part is complete. If it was complete with its header, no message is needed.
  if (!header.record.complete)
    call_.companion->send(call.first(), std::as_bytes(std::span(&call.number, 1)), call_.wait("gather_each: sending"));
  StreamReport& report = *call_.report;
  report.bytes += header.record.payload_bytes;
  call_.span->has_moved(report.bytes);
  report.arena_bytes += moved.arena_bytes;
  report.peak_slot_bytes = std::max(report.peak_slot_bytes, transfer_->pool_bytes() + call_.staged_bytes());
  transfer_.reset();
}

void StreamSending::withdraw() noexcept {
  transfer_.reset();
  for (const auto& part : under_way_)
    for (const auto& obligation : part) obligation->withdraw();
}

void StreamSending::send_by_part_sender(PartHeader header, const std::vector<TensorSlice>& slices,
                                        const Config* value) {
  call_.part_sender->offer(value, header.record);
  call_.part_sender->send(message_of(header, slices), call_.wait("gather_each: sending"));
  call_.report->bytes += header.record.payload_bytes;
  call_.span->has_moved(call_.report->bytes);
}

void StreamSending::send_header(const PartHeader& header, const std::vector<TensorSlice>& slices) {
  if (call_.part_sender != nullptr) return send_by_part_sender(header, slices, nullptr);
  call_.companion->send(call_.entry.first(), message_of(header, slices), call_.wait("gather_each: sending"));
}

void StreamSending::wait_for_credit() {
  call_.check();
  const auto depth = static_cast<std::size_t>(call_.part_options.pipeline_depth);
  const WaitOptions wait = call_.wait("gather_each: waiting until the first rank gives an earlier part back");
  if (under_way_.size() < depth && call_.part_sender == nullptr) return;
  const Clock::time_point begin = Clock::now();
  const int first = call_.entry.first();
  if (call_.part_sender != nullptr) call_.part_sender->wait_for_credit(depth, wait);
  while (under_way_.size() >= depth) {
    for (const auto& obligation : under_way_.front())
      call_.companion->wait_until(
          [&] { return obligation->is_given_back(); },
          [&](std::chrono::nanoseconds longest) { (void)obligation->wait(os::Clock::now() + longest); },
          std::span(&first, 1), wait);
    under_way_.pop_front();
  }
  call_.report->seconds_waiting += std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace muster::gather
