// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/destination.hpp"

#define XXH_INLINE_ALL
#include <fmt/core.h>
#include <xxhash.h>

#include <algorithm>
#include <map>
#include <set>

#include "muster/log.hpp"
#include "src/cuda/staging.hpp"
#include "src/gather/opening.hpp"
#include "src/os/fault.hpp"

namespace muster::cuda {
namespace {

constexpr const char* phase = "gather: receiving on a device";
constexpr const char* offer_phase = "gather: offering device memory";
constexpr const char* nccl_failed_phase = "gather: NCCL has failed";

void send_message(const gather::GatherCall& call, OfferHeader header, std::span<const ExportedBuffer> exports,
                  std::span<const std::uint64_t> gone, std::span<const std::byte> body) {
  header.exchange = call.number;
  header.exports = static_cast<std::uint32_t>(exports.size());
  header.gone = static_cast<std::uint32_t>(gone.size());
  header.body_bytes = body.size();
  header.body_hash = XXH3_64bits(body.data(), body.size());
  std::vector<std::byte> message;
  append(message, header);
  for (const ExportedBuffer& exported : exports) append(message, exported);
  for (const std::uint64_t buffer : gone) append(message, buffer);
  message.insert(message.end(), body.begin(), body.end());
  os::damage_descriptor(message);
  call.group->send(call.first(), message, call.wait(offer_phase), group::Subject::exchange);
}

/// The CPU waits for the work that the caller has queued, because the next copy runs in another process.
void wait_for_caller(const gather::GatherCall& call, const std::set<int>& devices) {
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

/// Sends the message that `make` makes. If that fails, sends a failure, because the root waits for a message.
void send_or_fail(const gather::GatherCall& call, const auto& make) {
  try {
    make();
  } catch (const std::exception&) {
    if (!call.group->error()) send_message(call, {.has_failed = 1}, {}, {}, {});
    throw;
  }
}

struct Offer {
  OfferHeader header;
  std::vector<ExportedBuffer> exports;
  std::vector<std::uint64_t> gone;
  std::vector<std::byte> body;
};

/// Returns the maximum size of an offer whose descriptor has `bytes` bytes. Places add two numbers per tensor.
std::uint64_t most_offer_bytes(std::uint64_t bytes) {
  return sizeof(OfferHeader) + most_exports * (sizeof(ExportedBuffer) + sizeof(std::uint64_t)) + 16 * bytes;
}

Offer receive_offer(const gather::GatherCall& call, int sender, std::uint64_t descriptor_bytes) {
  const std::vector<std::byte> message = receive_of(call, sender, most_offer_bytes(descriptor_bytes), phase);
  MessageReader reader(message);
  Offer offer;
  offer.header = reader.take<OfferHeader>();
  if (offer.header.has_failed != 0) return offer;
  for (std::uint32_t i = 0; i < offer.header.exports; ++i) offer.exports.push_back(reader.take<ExportedBuffer>());
  for (std::uint32_t i = 0; i < offer.header.gone; ++i) offer.gone.push_back(reader.take<std::uint64_t>());
  offer.body.assign(reader.rest().begin(), reader.rest().end());
  if (offer.body.size() != offer.header.body_bytes ||
      XXH3_64bits(offer.body.data(), offer.body.size()) != offer.header.body_hash)
    throw Error(ErrorKind::corrupt, "malformed message: a descriptor differs from the announced one");
  return offer;
}

Answer receive_answer(const gather::GatherCall& call) {
  const std::vector<std::byte> message = receive_of(call, call.first(), sizeof(Answer) + 4096, offer_phase);
  return MessageReader(message).take<Answer>();
}

}  // namespace

bool DeviceSending::by_ipc() {
  std::vector<ExportedBuffer> exports;
  send_or_fail(call_, [&] {
    std::map<std::uint64_t, std::uint32_t> numbers;  // by buffer
    std::set<int> devices;
    const std::vector<std::uint64_t> gone = state_.exports.take_gone(call_.first());
    const std::vector<std::byte> body = core::encode_descriptor(*call_.value, [&](const Tensor& tensor) {
      if (tensor.device().is_host() || tensor.nbytes() == 0) return std::optional<core::TensorLocation>();
      devices.insert(tensor.device().index);
      const Exports::FoundBuffer found = state_.exports.find(tensor.view());
      const auto [number, is_new] =
          numbers.try_emplace(found.exported.buffer, static_cast<std::uint32_t>(exports.size() + 1));
      if (is_new) exports.push_back(found.exported);
      return std::optional(core::TensorLocation{number->second, found.offset});
    });
    if (exports.size() > most_exports)
      throw Error(
          ErrorKind::invalid_argument,
          fmt::format(
              "the tensors are in {} allocations, more than CUDA IPC can offer. Set MUSTER_DEVICE_TRANSPORT to staging",
              exports.size()));
    wait_for_caller(call_, devices);
    send_message(call_, {}, exports, gone, body);
  });
  // The root may have opened some of the allocations, even if it asks for staging.
  for (const ExportedBuffer& exported : exports) state_.exports.note_told(call_.first(), exported.buffer);
  return receive_answer(call_).verdict != Verdict::stage;
}

void DeviceSending::by_nccl(std::span<const int> members) {
  std::vector<const Tensor*> tensors;
  NcclLists::NcclEntry& entry = state_.nccl.of(members);
  send_or_fail(call_, [&] {
    const std::vector<std::byte> body = core::encode_descriptor(*call_.value, [&](const Tensor& tensor) {
      if (!tensor.device().is_host() && tensor.nbytes() != 0) tensors.push_back(&tensor);
      return std::optional<core::TensorLocation>();
    });
    send_message(call_, {.communicator = entry.communicator ? entry.number : 0}, {}, {}, body);
  });
  const Answer answer = receive_answer(call_);
  if (answer.verdict != Verdict::taken || tensors.empty()) return;
  by_nccl_or_fail(
      *call_.group, members.first(1), call_.wait(nccl_failed_phase),
      [&] { send_by_nccl(tensors, entry, answer, members); }, [&] { entry.communicator.reset(); });
}

void DeviceSending::send_by_nccl(std::span<const Tensor* const> tensors, NcclLists::NcclEntry& entry,
                                 const Answer& answer, std::span<const int> members) {
  const int device = tensors.front()->device().index;
  const Current current(device);
  CopyQueue& queue = state_.queue(device);
  const WaitOptions wait = call_.wait("gather: sending between devices");
  const auto ready = [&] { return entry.communicator->is_ready(); };
  if (answer.is_new != 0) {
    entry.communicator.reset();
    entry.communicator = std::make_unique<Communicator>(answer.size, answer.rank, answer.id);
    entry.number = answer.communicator;
    wait_for_device(*call_.group, ready, "NCCL to connect to the other ranks", wait, members.first(1));
  }
  queue.follow_caller();
  for (std::size_t at = 0; at < tensors.size(); at += nccl_batch) {
    Communicator::batch([&] {
      for (std::size_t i = at; i < std::min(tensors.size(), at + nccl_batch); ++i)
        entry.communicator->send(device_pointer(tensors[i]->data()), tensors[i]->nbytes(), 0, queue.stream());
    });
    wait_for_device(*call_.group, ready, "NCCL to send", wait, members.first(1));
    queue.mark();
  }
  queue.finish(*call_.group, wait, {members.first(1), [&] { (void)ready(); }});
}

// The root's side.

Tensor DeviceDestination::tensor_at(DType dtype, const Shape& shape, const MemoryPool::Buffer& buffer,
                                    std::uint64_t offset, std::uint64_t bytes) const {
  const std::byte* const data = bytes == 0 ? nullptr : buffer.data.get() + offset;
  return {TensorView(dtype, shape, data, {}, {Device::Kind::cuda, device_}), buffer.data};
}

void DeviceDestination::begin() {
  if (has_begun_) return;
  // The memory of an earlier result is reused. Work of the caller that reads it must complete first.
  state_.queue(device_).follow_caller();
  has_begun_ = true;
}

DeviceDestination::DeviceTree DeviceDestination::take_in(std::size_t position, const gather::ExchangeRecord& record,
                                                         std::span<const std::byte> descriptor, const TakeIn& take) {
  DeviceTree tree;
  tree.position = position;
  const MemoryPool::Buffer buffer = state_.memory_of(device_).take(record.moving_bytes);
  state_.queue(device_).keep(buffer.data);
  core::SlotLayout layout;
  tree.config = core::decode_descriptor(
      descriptor, [&](DType dtype, const Shape& shape, std::uint64_t bytes, core::TensorLocation place) -> Tensor {
        const std::uint64_t to = layout.place(bytes);
        if (to > buffer.bytes || bytes > buffer.bytes - to)
          throw Error(ErrorKind::corrupt, "malformed message: a tensor exceeds the announced bytes");
        if (bytes != 0) take(place, device_pointer(buffer.data.get()) + to, bytes);
        return tensor_at(dtype, shape, buffer, to, bytes);
      });
  return tree;
}

bool DeviceDestination::take_ipc(std::size_t position, const gather::ExchangeRecord& record) {
  const int sender = call_.list[position];
  Answer answer{.exchange = call_.number};
  const auto reply = [&] {
    call_.group->send(sender, std::as_bytes(std::span(&answer, 1)), call_.wait(phase), group::Subject::exchange);
  };
  std::string obstacle;
  try {
    const Offer offer = receive_offer(call_, sender, record.descriptor_bytes);
    if (offer.header.has_failed != 0) {
      // Round 2 contains the error of the sender, which waits for no answer.
      return true;
    }
    state_.opened.close(sender, offer.gone);
    std::vector<DevicePointer> opened;
    try {
      for (const ExportedBuffer& exported : offer.exports)
        opened.push_back(state_.opened.open(sender, exported, device_, opened));
    } catch (const Error& error) {
      obstacle = error.what();
    }
    if (!obstacle.empty()) {
      log(LogLevel::info,
          fmt::format("rank {}: the data of rank {} is staged: {}", call_.group->rank(), sender, obstacle));
      answer.verdict = Verdict::stage;
      reply();
      return false;
    }
    begin();
    const auto copy = [&](core::TensorLocation place, DevicePointer to, std::uint64_t bytes) {
      if (place.segment == 0 || place.segment > opened.size())
        throw Error(ErrorKind::corrupt, "malformed message: a tensor is in no allocation that was offered");
      const ExportedBuffer& exported = offer.exports[place.segment - 1];
      if (place.offset > exported.bytes || bytes > exported.bytes - place.offset)
        throw Error(ErrorKind::corrupt, "malformed message: a tensor exceeds the announced bytes");
      state_.queue(device_).on_device(opened[place.segment - 1] + place.offset, to, bytes);
    };
    trees_.push_back(take_in(position, record, offer.body, copy));
    answer.verdict = Verdict::taken;
  } catch (const Error& error) {
    if (call_.group->error()) throw;
    reply();
    throw error.with_context(fmt::format("receiving the device tensors of rank {}", sender));
  } catch (const std::bad_alloc&) {
    reply();
    throw;
  }
  reply();
  return true;
}

void DeviceDestination::take_nccl(std::span<const std::size_t> positions, const gather::Records& records) {
  std::vector<int> members{call_.first()};
  for (const std::size_t position : positions) members.push_back(call_.list[position]);
  NcclLists::NcclEntry& entry = state_.nccl.of(members);
  gather::Attempts attempt(*call_.group);
  std::vector<bool> waits(positions.size(), true);  // for an answer
  std::vector<DeviceTree> trees;
  bool is_known = entry.communicator != nullptr;
  for (std::size_t i = 0; i < positions.size(); ++i) {
    const int sender = call_.list[positions[i]];
    const gather::ExchangeRecord& record = records[static_cast<std::size_t>(sender)];
    // Every offer is received, even if one of them is bad.
    attempt([&] {
      try {
        const Offer offer = receive_offer(call_, sender, record.descriptor_bytes);
        waits[i] = offer.header.has_failed == 0;
        if (!waits[i]) return;
        is_known = is_known && offer.header.communicator == entry.number;
        entry.number = std::max(entry.number, offer.header.communicator);
        std::vector<std::pair<DevicePointer, std::uint64_t>> places;
        trees.push_back(take_in(
            positions[i], record, offer.body,
            [&](core::TensorLocation, DevicePointer to, std::uint64_t bytes) { places.emplace_back(to, bytes); }));
        trees.back().places = std::move(places);
      } catch (const Error& error) {
        throw error.with_context(fmt::format("receiving the device tensors of rank {}", sender));
      }
    });
  }
  const bool all_offer = std::ranges::find(waits, false) == waits.end();
  Answer answer{.exchange = call_.number};
  if (all_offer && !attempt.have_failed() && !is_known)
    attempt([&] {
      answer.id = make_nccl_id();
      answer.is_new = 1;
      ++entry.number;
    });
  const bool is_well = all_offer && !attempt.have_failed();
  if (is_well) answer.verdict = Verdict::taken;
  answer.communicator = entry.number;
  answer.size = static_cast<std::int32_t>(members.size());
  for (std::size_t i = 0; i < positions.size(); ++i) {
    answer.rank = static_cast<std::int32_t>(i + 1);
    if (waits[i])
      call_.group->send(members[i + 1], std::as_bytes(std::span(&answer, 1)), call_.wait(phase),
                        group::Subject::exchange);
  }
  attempt.throw_failure();
  if (!is_well) return;  // round 2 contains the error
  const Current current(device_);
  const std::span<const int> senders = std::span<const int>(members).subspan(1);
  const auto receive = [&] {
    if (answer.is_new != 0) {
      entry.communicator.reset();
      entry.communicator = std::make_unique<Communicator>(answer.size, 0, answer.id);
      wait_for_device(
          *call_.group, [&] { return entry.communicator->is_ready(); }, "NCCL to connect to the other ranks",
          call_.wait(phase), senders);
    }
    receive_trees(trees, *entry.communicator, senders);
  };
  by_nccl_or_fail(*call_.group, senders, call_.wait(nccl_failed_phase), receive, [&] { entry.communicator.reset(); });
  std::ranges::move(trees, std::back_inserter(trees_));
}

void DeviceDestination::receive_trees(std::vector<DeviceTree>& trees, Communicator& communicator,
                                      std::span<const int> senders) {
  begin();
  CopyQueue& queue = state_.queue(device_);
  std::size_t most = 0;
  for (const DeviceTree& tree : trees) most = std::max(most, tree.places.size());
  for (std::size_t at = 0; at < most; at += nccl_batch) {
    Communicator::batch([&] {
      for (std::size_t i = 0; i < trees.size(); ++i)
        for (std::size_t k = at; k < std::min(trees[i].places.size(), at + nccl_batch); ++k)
          communicator.receive(trees[i].places[k].first, trees[i].places[k].second, static_cast<int>(i + 1),
                               queue.stream());
    });
    wait_for_device(
        *call_.group, [&] { return communicator.is_ready(); }, "NCCL to receive", call_.wait(phase), senders);
    queue.mark();
  }
  // A failure between the devices does not end the stream. The communicator reports it.
  queue.finish(*call_.group, call_.wait(phase), {senders, [&] { (void)communicator.is_ready(); }});
}

void DeviceDestination::reserve(std::size_t position, std::uint64_t bytes) {
  begin();
  reserved_.emplace_back(position, state_.memory_of(device_).take(bytes));
  state_.queue(device_).keep(reserved_.back().second.data);
}

Config DeviceDestination::upload(std::size_t position, const Config& tree) {
  const auto found = std::ranges::find(reserved_, position, [](const auto& item) { return item.first; });
  const MemoryPool::Buffer buffer = found == reserved_.end() ? MemoryPool::Buffer{} : found->second;
  core::SlotLayout layout;
  CopyQueue& queue = state_.queue(device_);
  return with_all_tensors(tree, [&](const Tensor& tensor) {
    const std::uint64_t to = layout.place(tensor.nbytes());
    if (tensor.nbytes() == 0) return tensor;
    if (to > buffer.bytes || tensor.nbytes() > buffer.bytes - to)
      throw Error(ErrorKind::corrupt, "malformed message: a rank sent more than it announced");
    queue.bounce_to_device(tensor.bytes().data(), device_pointer(buffer.data.get()) + to, tensor.nbytes(),
                           *state_.pinned, *call_.group, call_.wait(phase));
    return tensor_at(tensor.dtype(), tensor.shape(), buffer, to, tensor.nbytes());
  });
}

Config DeviceDestination::copy_of(const Config& tree) {
  core::SlotLayout sizes;
  visit_device_tensors(tree, [&](const Tensor& tensor) { sizes.place(tensor.nbytes()); });
  if (sizes.size() == 0) return tree;
  begin();
  const MemoryPool::Buffer buffer = state_.memory_of(device_).take(sizes.size());
  CopyQueue& queue = state_.queue(device_);
  queue.keep(buffer.data);
  std::set<int> others;
  visit_device_tensors(tree, [&](const Tensor& tensor) { others.insert(tensor.device().index); });
  others.erase(device_);
  for (const int other : others) queue.follow_caller(other);
  core::SlotLayout layout;
  return with_tensors(tree, [&](const Tensor& tensor) {
    if (!tensor.view().is_contiguous())
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("a strided tensor of shape {} on {} cannot be copied between devices. Make it contiguous "
                              "first, or borrow it (RootTensors::borrow)",
                              to_string(tensor.shape()), to_string(tensor.device())));
    const std::uint64_t to = layout.place(tensor.nbytes());
    queue.on_device(device_pointer(tensor.data()), device_pointer(buffer.data.get()) + to, tensor.nbytes());
    return tensor_at(tensor.dtype(), tensor.shape(), buffer, to, tensor.nbytes());
  });
}

void DeviceDestination::finish() {
  if (!has_begun_) return;
  state_.queue(device_).finish(*call_.group, call_.wait(phase));
  state_.opened.close_surplus();
}

void DeviceDestination::deliver(std::vector<std::optional<Config>>& entries) {
  for (DeviceTree& tree : trees_) entries[tree.position] = std::move(tree.config);
  trees_.clear();
}

}  // namespace muster::cuda
