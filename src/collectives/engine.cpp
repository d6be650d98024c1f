// SPDX-License-Identifier: Apache-2.0
#include "src/collectives/engine.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <utility>

#include "src/base/fixed_string.hpp"
#include "src/base/message.hpp"
#include "src/collectives/packed_config.hpp"
#include "src/group/error_propagation.hpp"
#include "src/merge/reduce.hpp"
#include "src/trace/span.hpp"

namespace muster::collectives {

Engine::Engine(std::shared_ptr<Group> group, const CollectiveOptions& options) : group_(std::move(group)) {
  const group::GroupLock use(*group_);
  check_ranks_on_hosts(group::inside(*group_));
  if (size() > 1) backend_ = shared_backend(group::inside(*group_), waits(options, "process group"));
  if (!backend_) backend_ = hosts_backend(group::inside(*group_), waits(options, "process group"));
  if (!backend_) backend_ = message_backend(group::inside(*group_));
  ins_.resize(static_cast<std::size_t>(size()));
  outs_.resize(ins_.size());
}

namespace {

/// Allocations up to this size are made without an agreement. If one fails, the group fails.
constexpr std::uint64_t most_unchecked = 1 << 20;

/// Calls memset, because the loop that compilers generate for std::fill takes longer to start than these few elements
/// take.
template <class Span>
void clear(std::vector<Span>& all) {
  std::memset(static_cast<void*>(all.data()), 0, all.size() * sizeof(Span));
}

}  // namespace

struct Engine::Call {
  explicit Call(WaitOptions its) : waits(std::move(its)) {}
  WaitOptions waits;
  CallSummary card;
  std::optional<Error> trouble;  // the error of this rank's arguments
  // Allocates results whose sizes are known only from the cards; set on every rank or on none.
  std::optional<Opened> then;
};

template <class Prepare, class Move>
void Engine::run(const What& what, std::span<const Device> where, const CollectiveOptions& options,
                 const Prepare& prepare, const Move& move) {
  const DeviceEnd at_end(*this);
  const group::GroupLock use(*group_);
  trace::Span span(trace::SpanKind::collective, what.name, group::inside(*group_).operations().next());
  device_ = nullptr;
  place_ = {};
  Call call(waits(options, what.name));
  clear(ins_);
  clear(outs_);
  call.trouble = group::attempt(*group_, [&] {
    if (what.root && (*what.root < 0 || *what.root >= size()))
      throw Error(ErrorKind::invalid_argument, out_of_range_text("root", *what.root, size()));
    if (!where.empty()) {
      if (!devices_) devices_ = device_backend(group::inside(*group_), *backend_);
      place_ = devices_->begin(where);
      device_ = devices_.get();
    }
    prepare(call.card);
  });
  call.card.status = call.trouble ? 1 : 0;
  if (!call.trouble) call.card.agreed = what.hash() ^ place_.hash();
  if (device_ != nullptr) call.card.on_devices = {place_.devices, 0};
  span.add_bytes(call.card.bytes);
  span.set_route(mover().name());
  const auto opened = [&](std::span<const CallSummary> cards) {
    for (const CallSummary& card : cards)
      if (card.status != 0) group::inside(*group_).agree(call.trouble, call.waits);
    for (const CallSummary& card : cards)
      if (card.agreed != cards.front().agreed) disagree(what, cards, call.waits);
    if (!call.then) return;
    // All ranks know all sizes, so all make the same choice. An additional round is cheap compared with a large result,
    // and a lack of memory then leaves the group usable.
    std::uint64_t bytes = 0;
    for (const CallSummary& card : cards) bytes += card.bytes;
    if (bytes <= most_unchecked) return group::or_fail(*group_, [&] { (*call.then)(cards); });
    const auto trouble = group::attempt(*group_, [&] { (*call.then)(cards); });
    group::inside(*group_).agree(trouble, call.waits);
  };
  group::unless_out_of_memory(*group_, [&] { move(call, opened); });
}

void Engine::disagree(const What& what, std::span<const CallSummary> cards, const WaitOptions& options) const {
  using Words = std::array<char, 512>;
  Words mine;
  put_text(mine, what.words() + place_.words());
  std::vector<Words> all(cards.size());
  group_->all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)), options);
  const auto other =
      std::ranges::find_if(cards, [&](const CallSummary& card) { return card.agreed != cards[0].agreed; });
  const auto rank = static_cast<std::size_t>(other - cards.begin());
  throw group::error_of(group_->info(static_cast<int>(rank)), ErrorKind::rank_mismatch,
                        fmt::format("{} calls {}, {} {}. Make the same calls in the same order on all ranks",
                                    group::name_of(group_->info(0)), get_text(all[0]),
                                    group::name_of(group_->info(static_cast<int>(rank))), get_text(all[rank])));
}

void Engine::check_reducible(ReduceOp op, DType dtype) const {
  merge::check_reducible(combine_of(op), dtype);
  if (device_ != nullptr) device_->check_reducible(combine_of(op), dtype);
}

void Engine::place(const Tensor& all, std::span<const std::uint64_t> sizes) {
  std::uint64_t at = 0;
  for (std::size_t rank = 0; rank < outs_.size(); ++rank) {
    outs_[rank] = sizes[rank] == 0 ? Room{} : Room{all.mutable_data() + at, sizes[rank]};
    at += sizes[rank];
  }
}

void Engine::barrier(const CollectiveOptions& options) {
  const What what{"barrier"};
  run(
      what, {}, options, [](CallSummary&) {},
      [&](Call& call, const Opened& opened) { mover().all_gather(call.card, opened, {}, outs_, call.waits); });
}

void Engine::refuse(const Error& failure) {
  run(
      What{"refused"}, {}, {}, [&](CallSummary&) { throw Error(failure); },
      [&](Call& call, const Opened& opened) { mover().all_gather(call.card, opened, {}, outs_, call.waits); });
  throw Error(failure);
}

void Engine::wait_for_devices(const CollectiveOptions& options) {
  if (!devices_) return;
  const DeviceEnd at_end(*this);
  const group::GroupLock use(*group_);
  devices_->wait(waits(options, "wait_for_devices"));
}

std::optional<Tensor> Engine::all_reduce(const What& what, const Tensor* into, const TensorView& tensor,
                                         const CollectiveOptions& options) {
  Contiguous in;
  Room room;
  std::optional<Tensor> made;
  run(
      what, devices_of(tensor), options,
      [&](CallSummary& card) {
        check_reducible(*what.op, tensor.dtype());
        card.wants = !what.root || *what.root == rank() ? 1 : 0;
        if (card.wants != 0) {
          if (into == nullptr) made = new_result(tensor.dtype(), tensor.shape(), device_);
          const Tensor& out = into == nullptr ? *made : *into;
          check_same(out, tensor, "the result");
          room = room_of(out, device_);
        }
        in = Contiguous(tensor, device_);
        card.bytes = in.bytes().size();
      },
      [&](Call& call, const Opened& opened) {
        mover().all_reduce(call.card, opened, combine_of(*what.op), tensor.dtype(), in.bytes(), room, call.waits);
      });
  return made;
}

Tensor Engine::all_reduce_shared(const What& what, const TensorView& tensor, const CollectiveOptions& options) {
  Contiguous in;
  HeldResult result;
  run(
      what, {}, options,
      [&](CallSummary& card) {
        check_on_host(tensor, what.name);
        merge::check_reducible(combine_of(*what.op), tensor.dtype());
        in = Contiguous(tensor);
        card.bytes = in.bytes().size();
      },
      [&](Call& call, const Opened& opened) {
        result =
            mover().all_reduce_shared(call.card, opened, combine_of(*what.op), tensor.dtype(), in.bytes(), call.waits);
      });
  return {TensorView(tensor.dtype(), tensor.shape(), result.data), std::move(result.keeper)};
}

Tensor Engine::all_gather_shared(What what, const TensorView& tensor, const CollectiveOptions& options) {
  Contiguous in;
  HeldResult result;
  what.dtype = tensor.dtype();
  what.shape = &tensor.shape();
  run(
      what, {}, options,
      [&](CallSummary& card) {
        check_on_host(tensor, what.name);
        what.dim = dimension(tensor.shape(), 0);
        check_whole_bytes(tensor.dtype(), tensor.shape(), 0);
        in = Contiguous(tensor);
        card.bytes = card.largest = in.bytes().size();
      },
      [&](Call& call, const Opened& opened) {
        result = mover().all_gather_shared(call.card, opened, in.bytes(), ins_.size(), call.waits);
      });
  Shape shape = tensor.shape();
  shape[0] *= size();
  return {TensorView(tensor.dtype(), std::move(shape), result.data), std::move(result.keeper)};
}

void Engine::broadcast(const What& what, const Tensor& tensor, const CollectiveOptions& options) {
  Bytes in;
  run(
      what, devices_of(tensor), options,
      [&](CallSummary& card) {
        if (what.root != rank()) {
          outs_[static_cast<std::size_t>(*what.root)] = room_of(tensor, device_);
          return;
        }
        in = bytes_of(tensor, device_);
        card.bytes = card.largest = in.size();
        card.wants = 0;
      },
      [&](Call& call, const Opened& opened) { mover().all_gather(call.card, opened, in, outs_, call.waits); });
}

std::optional<Tensor> Engine::gather(What what, const TensorView& tensor, int dim, const CollectiveOptions& options,
                                     const Tensor* into) {
  std::size_t along = 0;
  Contiguous in;
  std::optional<Tensor> parts;  // used if the caller passes no result
  std::optional<Tensor> whole;  // parts that are not contiguous in the result are joined here
  const auto allocate = [&](std::int64_t extent) {
    Shape shape = with_extent(tensor.shape(), along, extent);
    if (device_ == nullptr && rows_before(shape, along) > 1) whole = Tensor::allocate(tensor.dtype(), shape);
    parts = new_result(tensor.dtype(), std::move(shape), device_);
  };
  sizes_.clear();
  what.dtype = tensor.dtype();
  what.shape = &tensor.shape();
  run(
      what, devices_of(tensor), options,
      [&](CallSummary& card) {
        along = dimension(tensor.shape(), dim);
        check_whole_bytes(tensor.dtype(), tensor.shape(), along);
        in = Contiguous(tensor, device_);
        card.bytes = card.largest = in.bytes().size();
        card.extent = tensor.shape()[along];
        card.wants = !what.root || *what.root == rank() ? 1 : 0;
        card.joined = 1;
        what.dim = along;
        if (device_ != nullptr && into == nullptr && card.wants != 0) device_->check_can_allocate();
        if (into != nullptr) {
          check_result(*into, tensor, along, tensor.shape()[along] * size());
          (void)room_of(*into, device_);
        }
        const std::span<const std::int64_t> extents = what.slices;
        if (!extents.empty() && (extents.size() != ins_.size() || extents[self()] != tensor.shape()[along]))
          throw Error(
              ErrorKind::invalid_argument,
              fmt::format("sizes: received {} for {} ranks, of which this rank's must be {}, its size of dimension {}",
                          extents.size(), ins_.size(), tensor.shape()[along], along));
        if (into == nullptr && card.wants != 0 && !what.varies) allocate(tensor.shape()[along] * size());
      },
      [&](Call& call, const Opened& opened) {
        const auto then = [&](std::span<const CallSummary> cards) {
          if (call.card.wants == 0) return;
          std::int64_t extent = 0;
          bool is_malformed = false;
          for (const CallSummary& card : cards) {
            is_malformed |= card.extent < 0 || __builtin_add_overflow(extent, card.extent, &extent);
            sizes_.push_back(card.bytes);
          }
          if (is_malformed || std::accumulate(sizes_.begin(), sizes_.end(), std::uint64_t{0}) !=
                                  byte_size(tensor.dtype(), with_extent(tensor.shape(), along, extent)))
            throw Error(ErrorKind::corrupt,
                        "malformed message: the ranks announce another number of bytes than their sizes have");
          if (into == nullptr && what.varies) allocate(extent);
          place(parts ? *parts : *into, sizes_);
        };
        call.then.emplace(then);
        mover().all_gather(call.card, opened, in.bytes(), outs_, call.waits);
      });
  if (!parts) return std::nullopt;
  const std::uint64_t rows = rows_before(parts->shape(), along);
  if (rows <= 1 || parts->nbytes() == 0) return parts;
  if (device_ != nullptr) return device_->join(*parts, sizes_, rows);
  join_parts(*parts, sizes_, rows, *whole);
  return whole;
}

void Engine::gather_each(What what, std::span<const Tensor> outs, const TensorView& tensor,
                         const CollectiveOptions& options) {
  Contiguous in;
  std::vector<std::int64_t> extents;
  what.dtype = tensor.dtype();
  what.shape = &tensor.shape();
  run(
      what, devices_of(tensor), options,
      [&](CallSummary& card) {
        card.wants = !what.root || *what.root == rank() ? 1 : 0;
        const std::size_t wanted = card.wants != 0 ? ins_.size() : 0;
        if (outs.size() != wanted)
          throw Error(
              ErrorKind::invalid_argument,
              fmt::format(
                  "this rank must pass {} tensors (one per rank where the result is received, otherwise none), not {}",
                  wanted, outs.size()));
        for (std::size_t i = 0; i < outs.size(); ++i) {
          if (what.varies && i != self()) {
            check_result(outs[i], tensor, 0, outs[i].shape().empty() ? 0 : outs[i].shape()[0]);
          } else {
            check_same(outs[i], tensor, "a result");
          }
          outs_[i] = room_of(outs[i], device_);
          if (what.varies && !tensor.shape().empty()) extents.push_back(outs[i].shape()[0]);
        }
        // All ranks know the extents of all.
        what.slices = extents;
        if (what.varies && !extents.empty())
          what.dim = 0;
        else
          what.varies = false;
        in = Contiguous(tensor, device_);
        card.bytes = card.largest = in.bytes().size();
      },
      [&](Call& call, const Opened& opened) { mover().all_gather(call.card, opened, in.bytes(), outs_, call.waits); });
}

std::optional<Tensor> Engine::reduce_scatter(What what, const TensorView& tensor,
                                             std::optional<std::span<const std::int64_t>> sizes, int dim,
                                             const CollectiveOptions& options, const Tensor* into) {
  Contiguous in;
  std::optional<Tensor> out;
  Room room;
  what.dtype = tensor.dtype();
  what.shape = &tensor.shape();
  run(
      what, devices_of(tensor), options,
      [&](CallSummary& card) {
        check_reducible(*what.op, tensor.dtype());
        const std::size_t along = dimension(tensor.shape(), dim);
        cut(tensor.shape(), along, ins_.size(), sizes, extents_);
        what.dim = along;
        if (sizes) what.slices = *sizes;
        in = Contiguous(tensor, along, extents_, device_);
        const auto whole = static_cast<std::uint64_t>(std::max<std::int64_t>(tensor.shape()[along], 1));
        bounds_.assign(1, 0);
        for (const std::int64_t extent : extents_) {
          const std::uint64_t bytes = tensor.nbytes() / whole * static_cast<std::uint64_t>(extent);
          bounds_.push_back(bounds_.back() + bytes);
          card.largest = std::max(card.largest, bytes);
        }
        card.bytes = in.bytes().size();
        if (into != nullptr)
          check_result(*into, tensor, along, extents_[self()]);
        else
          out = new_result(tensor.dtype(), with_extent(tensor.shape(), along, extents_[self()]), device_);
        room = room_of(out ? *out : *into, device_);
      },
      [&](Call& call, const Opened& opened) {
        mover().reduce_scatter(call.card, opened, combine_of(*what.op), tensor.dtype(), in.bytes(), bounds_, room,
                               call.waits);
      });
  return out;
}

void Engine::scatter(const What& what, const Tensor& out, std::span<const TensorView> parts,
                     const CollectiveOptions& options) {
  std::vector<Contiguous> given;
  run(
      what, devices_of(out), options,
      [&](CallSummary& card) {
        outs_[static_cast<std::size_t>(*what.root)] = room_of(out, device_);
        const std::size_t wanted = what.root == rank() ? ins_.size() : 0;
        if (parts.size() != wanted)
          throw Error(
              ErrorKind::invalid_argument,
              fmt::format("this rank must pass {} tensors (root {} passes one per rank, other ranks none), not {}",
                          wanted, *what.root, parts.size()));
        for (std::size_t i = 0; i < parts.size(); ++i) {
          check_same(parts[i], out, "a part");
          ins_[i] = given.emplace_back(parts[i], device_).bytes();
        }
        card.largest = out.nbytes();
      },
      [&](Call& call, const Opened& opened) { mover().all_to_all(call.card, opened, ins_, outs_, call.waits); });
}

Tensor Engine::all_to_all(const TensorView& tensor, std::optional<std::span<const std::int64_t>> rows,
                          std::vector<std::int64_t>* received, const CollectiveOptions& options, const Tensor* into) {
  What what{rows ? "all_to_allv" : "all_to_all", {}, {}, tensor.dtype(), &tensor.shape()};
  Contiguous in;
  std::vector<std::int64_t> mine;
  std::vector<std::int64_t> theirs(ins_.size());
  std::uint64_t row_bytes = 0;
  const auto describe = [&] {
    (void)dimension(tensor.shape(), 0);
    cut(tensor.shape(), 0, ins_.size(), rows, mine);
    what.dim = 0;
    what.varies = rows.has_value();
    Shape row = tensor.shape();
    row[0] = 1;
    check_whole_bytes(tensor.dtype(), row, 0);
    row_bytes = byte_size(tensor.dtype(), row);
  };
  if (rows)
    // First exchange the number of rows that each rank sends.
    run(
        what, {}, options,
        [&](CallSummary& card) {
          describe();
          card.largest = sizeof(std::int64_t);
          for (std::size_t i = 0; i < ins_.size(); ++i) {
            ins_[i] = std::as_bytes(std::span(&mine[i], 1));
            outs_[i] = std::as_writable_bytes(std::span(&theirs[i], 1));
          }
        },
        [&](Call& call, const Opened& opened) { mover().all_to_all(call.card, opened, ins_, outs_, call.waits); });
  Tensor out;
  run(
      what, devices_of(tensor), options,
      [&](CallSummary& card) {
        if (!rows) {
          describe();
          theirs = mine;
        }
        in = Contiguous(tensor, device_);
        const std::int64_t extent = std::accumulate(theirs.begin(), theirs.end(), std::int64_t{0});
        if (into != nullptr) check_result(*into, tensor, 0, extent);
        out = into != nullptr ? *into : new_result(tensor.dtype(), with_extent(tensor.shape(), 0, extent), device_);
        (void)room_of(out, device_);
        std::uint64_t at = 0;
        std::uint64_t to = 0;
        for (std::size_t i = 0; i < ins_.size(); ++i) {
          ins_[i] = in.bytes().subspan(at, static_cast<std::uint64_t>(mine[i]) * row_bytes);
          at += ins_[i].size();
          const std::uint64_t bytes = static_cast<std::uint64_t>(theirs[i]) * row_bytes;
          outs_[i] = bytes == 0 ? Room{} : Room{out.mutable_data() + to, bytes};
          to += bytes;
          card.largest = std::max<std::uint64_t>(card.largest, ins_[i].size());
        }
      },
      [&](Call& call, const Opened& opened) { mover().all_to_all(call.card, opened, ins_, outs_, call.waits); });
  if (received != nullptr) *received = std::move(theirs);
  return out;
}

void Engine::on_devices(const What& what, std::span<const Device> devices, const CollectiveOptions& options,
                        FunctionRef<void(DeviceBackend&)> prepare,
                        FunctionRef<void(DeviceBackend&, const CallSummary&, const Opened&, const WaitOptions&)> move) {
  run(
      what, devices, options,
      [&](CallSummary&) {
        if (device_ == nullptr) throw Error(ErrorKind::invalid_argument, "the list of tensors must not be empty");
        prepare(*device_);
      },
      [&](Call& call, const Opened& opened) {
        if (device_ == nullptr) return mover().all_gather(call.card, opened, {}, outs_, call.waits);
        move(*device_, call.card, opened, call.waits);
      });
}

std::vector<Config> Engine::configs(const What& what, const Config& config, bool only_root_gives, bool only_root_gets,
                                    const CollectiveOptions& options) {
  const bool gives = !only_root_gives || what.root == rank();
  const bool gets = only_root_gives ? what.root != rank() : !only_root_gets || what.root == rank();
  Tensor in;
  Tensor all;
  std::vector<std::uint64_t> sizes;
  run(
      what, {}, options,
      [&](CallSummary& card) {
        if (gives) in = packed_whole(config);
        card.bytes = card.largest = in.nbytes();
        card.wants = gets ? 1 : 0;
      },
      [&](Call& call, const Opened& opened) {
        const auto then = [&](std::span<const CallSummary> cards) {
          if (!gets) return;
          std::uint64_t bytes = 0;
          for (const CallSummary& card : cards) bytes += sizes.emplace_back(card.bytes);
          all = Tensor::allocate(DType::u8, {static_cast<std::int64_t>(bytes)});
          place(all, sizes);
        };
        call.then.emplace(then);
        mover().all_gather(call.card, opened, in.bytes(), outs_, call.waits);
      });
  std::vector<Config> received;
  group::unless_out_of_memory(*group_, [&] {
    std::uint64_t at = 0;
    for (const std::uint64_t size : sizes) {
      if (size != 0) received.push_back(unpacked_whole(all, at, size));
      at += size;
    }
  });
  return received;
}

}  // namespace muster::collectives
