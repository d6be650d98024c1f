// SPDX-License-Identifier: Apache-2.0
// The root's side of a stream. Step numbers are those of stream.hpp.

#include <fmt/core.h>
#include <algorithm>
#include <cstring>
#include "src/base/message.hpp"
#include "src/core/descriptor.hpp"
#include "src/gather/slicing.hpp"
#include "src/gather/stream.hpp"
#include "src/os/clock.hpp"

namespace muster::gather {
namespace {

using Clock = std::chrono::steady_clock;

/// More than any header has: the paths of a few leaves, each at most max_config_depth keys long.
constexpr std::uint64_t most_header_bytes = 64 << 20;

/// Lets parts arrive while the caller's own code runs.
class Unattended {
 public:
  explicit Unattended(PartReceiver* part_receiver) : part_receiver_(part_receiver) {
    if (part_receiver_ != nullptr) part_receiver_->set_unattended(true);
  }
  ~Unattended() {
    if (part_receiver_ != nullptr) part_receiver_->set_unattended(false);
  }
  Unattended& operator=(Unattended&&) = delete;

 private:
  PartReceiver* part_receiver_;
};

}  // namespace

ReceivedPart received_part(std::span<const std::byte> message, int rank, std::uint64_t layer, std::uint32_t part,
                           std::uint32_t parts) {
  ReceivedPart received;
  PartHeader& header = received.header;
  if (message.size() < sizeof header)
    throw Error(ErrorKind::corrupt,
                fmt::format("malformed message: the header of a part from rank {} is too short", rank));
  std::memcpy(&header, message.data(), sizeof header);
  if (header.layer != layer || header.part != part || (part != 0 && (header.parts != parts || part >= parts)))
    throw Error(
        ErrorKind::corrupt,
        fmt::format("malformed message: expected part {} of layer {}, but rank {} sent part {} of {} of layer {}", part,
                    layer, rank, header.part, header.parts, header.layer));
  received.slices = decode_slices(message.subspan(sizeof header), rank);
  return received;
}

StreamReceiving::StreamReceiving(const StreamCall& call) : call_(call), arrivals_(call.entry.list.size()) {}

void StreamReceiving::run() {
  for (std::uint64_t layer = 0;; ++layer) {
    call_.check();
    std::optional<Config> own;
    {
      const Unattended unattended(call_.part_receiver);
      own = call_.next_layer(layer);
    }
    for (std::size_t position = 1; position < arrivals_.size(); ++position)
      arrivals_[position] = take_header(position, layer, 0);
    check_ends(layer, !own);
    if (!own) return;
    ++call_.report->layers;
    take_layer(layer, std::move(own));
  }
}

void StreamReceiving::take_layer(std::uint64_t layer, std::optional<Config> own) {
  if (own->is_null()) own.reset();
  std::optional<LayerParts> own_parts;
  std::uint64_t own_bytes = 0;
  if (own) {
    try {
      // The root's own layer is not sent. It is encoded anyway, so that an invalid tree fails on every rank in the same
      // way.
      core::encode_descriptor(*own, [&](const Tensor& tensor) {
        own_bytes += tensor.nbytes();
        return std::optional(core::TensorLocation{});
      });
      own_parts.emplace(*own, call_.part_bytes,
                        [this](const TensorView& tensor) { return call_.driver->moves(tensor); });
    } catch (const Error& error) {
      throw error.with_context(fmt::format("layer {}", layer));
    }
  }
  call_.report->bytes += own_bytes;
  std::uint32_t parts = own_parts ? own_parts->count() : 1;
  for (std::size_t position = 1; position < arrivals_.size(); ++position)
    parts = std::max(parts, arrivals_[position].header.parts);
  for (std::uint32_t number = 0; number < parts; ++number) {
    if (number != 0) {
      call_.check();
      for (std::size_t position = 1; position < arrivals_.size(); ++position) {
        ReceivedPart& arrival = arrivals_[position];
        if (number < arrival.header.parts)
          arrival = take_header(position, layer, number);
        else
          arrival = {.header = {layer, number, arrival.header.parts, {}}, .slices = {}};
      }
    }
    LayerPart part;
    part.layer = layer;
    part.part = number;
    part.num_parts = parts;
    part.ranks = call_.entry.list;
    part.configs.resize(part.ranks.size());
    if (own_parts && number < own_parts->count()) {
      Config tree = own_parts->make(number, &part.slices);
      std::optional<Config> staged = call_.staged(tree);
      part.configs.front() = staged ? std::move(*staged) : std::move(tree);
      for (TensorSlice& slice : part.slices) slice.rank = part.ranks.front();
    }
    take_bytes(part);
    if (number == 0) list_tensors(part);
    consume(part);
  }
}

void StreamReceiving::take_bytes(LayerPart& part) {
  const GatherCall call = call_.part_call(part.layer, part.part, nullptr);
  std::vector<std::pair<int, ExchangeRecord>> records;
  bool any = false;
  for (std::size_t position = 1; position < arrivals_.size(); ++position) {
    ReceivedPart& arrival = arrivals_[position];
    const ExchangeRecord& record = arrival.header.record;
    call_.report->bytes += record.payload_bytes;
    std::ranges::move(arrival.slices, std::back_inserter(part.slices));
    if (is_from_part_receiver(position)) continue;
    records.emplace_back(call.list[position], record);
    any = any || record.has_value;
  }
  take_from_part_receiver(part);
  if (!any) return;
  const std::unique_ptr<Transfer> transfer = call_.driver->begin(call);
  ExchangeReport moved;
  const Clock::time_point begin = Clock::now();
  transfer->move(Records::of(std::move(records)), moved);
  for (std::size_t position = 1; position < arrivals_.size(); ++position) {
    const ExchangeRecord& record = arrivals_[position].header.record;
    if (!record.has_value || record.complete || is_from_part_receiver(position)) continue;
    const std::vector<std::byte> whole = receive(call.list[position], sizeof call.number);
    if (whole.size() != sizeof call.number || std::memcmp(whole.data(), &call.number, sizeof call.number) != 0)
      throw Error(ErrorKind::corrupt, fmt::format("malformed message: rank {} ended a part that it had not begun",
                                                  call_.companion->info(call.list[position]).global_rank));
  }
  call_.report->seconds_waiting += std::chrono::duration<double>(Clock::now() - begin).count();
  transfer->commit();
  call_.report->arena_bytes += moved.arena_bytes;
  std::vector<std::optional<Config>> entries = transfer->deliver();
  for (std::size_t position = 1; position < entries.size(); ++position)
    if (!is_from_part_receiver(position)) part.configs[position] = std::move(entries[position]);
}

bool StreamReceiving::is_from_part_receiver(std::size_t position) const {
  return call_.part_receiver != nullptr && call_.part_receiver->brings(call_.entry.list[position]);
}

void StreamReceiving::take_from_part_receiver(LayerPart& part) {
  if (call_.part_receiver == nullptr) return;
  const Clock::time_point begin = Clock::now();
  for (std::size_t position = 1; position < arrivals_.size(); ++position)
    if (is_from_part_receiver(position) && part.part < std::max(arrivals_[position].header.parts, 1U))
      part.configs[position] =
          call_.part_receiver->take_part(call_.entry.list[position], call_.wait("gather_each: receiving"));
  call_.report->seconds_waiting += std::chrono::duration<double>(Clock::now() - begin).count();
  call_.report->peak_slot_bytes = std::max(call_.report->peak_slot_bytes, call_.part_receiver->peak_bytes());
}

ReceivedPart StreamReceiving::take_header(std::size_t position, std::uint64_t layer, std::uint32_t part) {
  const int sender = call_.entry.list[position];
  const Clock::time_point begin = Clock::now();
  const std::vector<std::byte> message =
      is_from_part_receiver(position) ? call_.part_receiver->take_header(sender, call_.wait("gather_each: receiving"))
                                      : receive(sender, most_header_bytes);
  call_.report->seconds_waiting += std::chrono::duration<double>(Clock::now() - begin).count();
  const int number = call_.companion->info(sender).global_rank;
  return received_part(message, number, layer, part, part == 0 ? 0 : arrivals_[position].header.parts);
}

void StreamReceiving::check_ends(std::uint64_t layer, bool own_end) const {
  const std::vector<int>& list = call_.entry.list;
  const auto has_ended = [&](std::size_t position) {
    return position == 0 ? own_end : arrivals_[position].header.parts == 0;
  };
  bool differ = false;
  for (std::size_t position = 1; position < list.size(); ++position) differ = differ || has_ended(position) != own_end;
  if (!differ) return;
  std::string text;
  for (std::size_t position = 0; position < list.size(); ++position)
    text += fmt::format("{}rank {} {}{}", position == 0 ? "" : ", ", call_.companion->info(list[position]).global_rank,
                        has_ended(position) ? "" : "more than ", layer);
  throw Error(ErrorKind::rank_mismatch, "the sources of a list have different numbers of layers: " + text);
}

std::vector<std::byte> StreamReceiving::receive(int sender, std::uint64_t most) {
  return call_.companion->receive(sender, most, call_.wait("gather_each: receiving"));
}

void StreamReceiving::consume(LayerPart& part) {
  ++call_.report->parts;
  call_.span->has_moved(call_.report->bytes);
  const Unattended unattended(call_.part_receiver);
  call_.call_back(fmt::format("the consumer threw at layer {}", part.layer), [&] { (*call_.consume)(part); });
}

// A sender's side of a stream. Step numbers are those of stream.hpp.
namespace {

using Clock = std::chrono::steady_clock;

/// Returns the header as it is sent.
std::vector<std::byte> message_of(const PartHeader& header, const std::vector<TensorSlice>& slices) {
  std::vector<std::byte> message(sizeof header);
  std::memcpy(message.data(), &header, sizeof header);
  if (slices.empty()) return message;
  const auto tail = encode_slices(slices);
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
      if (call_.companion->error()) throw;
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
  GatherCall& call = part_call_ = call_.part_call(layer, part, value);
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
    throw Error(ErrorKind::out_of_space,
                fmt::format("too little shared memory for a part: needed {}, available {} ({}). Lower memory_budget, "
                            "or give the job more memory",
                            byte_text(header.record.fresh_bytes), byte_text(header.record.available_bytes),
                            os::to_string(header.record.limit)));
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
  const WaitOptions wait = call_.wait("gather_each: waiting until the root releases an earlier part");
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
