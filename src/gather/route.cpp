// SPDX-License-Identifier: Apache-2.0
// The table of routes, and the transfers that move no bytes: lists of one rank, and merges in which no element moves.
// These are merges of one rank, First, and Same, whose ranks only compare hashes in round 1.

#include "src/gather/route.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "src/gather/merge_record.hpp"
#include "src/merge/layout.hpp"
#include "src/merge/reduce.hpp"
#include "src/shm/arena_core.hpp"

namespace muster::gather {
namespace {

constexpr std::uint64_t hashed_at_once = 1 << 20;

class LocalTransfer final : public Transfer {
 public:
  void offer(ExchangeRecord&) override {}
  void move(const Records&, ExchangeReport&) override {}
  std::vector<std::optional<Config>> deliver() override { return std::vector<std::optional<Config>>(1); }
};

/// The route of lists with one rank: its own value is the result.
class LocalRoute final : public RouteDriver {
 public:
  [[nodiscard]] Route route() const noexcept override { return Route::local; }
  [[nodiscard]] bool is_usable(const GatherCall& call) const override { return call.list.size() == 1; }
  [[nodiscard]] std::string obstacle(const GatherCall&) const override {
    return "this route serves lists of one rank only";
  }
  [[nodiscard]] std::string reason(const GatherCall&) const override { return "the list has one rank"; }
  std::unique_ptr<Transfer> begin(const GatherCall&) const override { return std::make_unique<LocalTransfer>(); }
};

XXH128_hash_t hash_of(const TensorView& tensor, Group& group) {
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  std::vector<std::byte> staging(tensor.is_contiguous() ? 0 : std::min(tensor.nbytes(), hashed_at_once));
  for (std::uint64_t begin = 0; begin < tensor.nbytes(); begin += hashed_at_once) {
    const std::uint64_t end = std::min(begin + hashed_at_once, tensor.nbytes());
    XXH3_128bits_update(&state, merge::gapless(tensor, begin, end, staging.data()), end - begin);
    group.progress();
  }
  return XXH3_128bits_digest(&state);
}

/// Returns the same elements with the shape that the merge gives them.
TensorView reshaped(const TensorView& tensor, const Merge& merge) {
  if (!std::holds_alternative<merge::Stack>(merge)) return tensor;
  Shape shape = tensor.shape();
  shape.insert(shape.begin(), 1);
  Strides strides = tensor.strides();
  if (!strides.empty()) strides.insert(strides.begin(), 0);
  return {tensor.dtype(), std::move(shape), tensor.data(), std::move(strides), tensor.device()};
}

class UnmovedMerge final : public Transfer {
 public:
  explicit UnmovedMerge(const GatherCall& call) : call_(call) {}

  void offer(ExchangeRecord& record) override {
    const TensorView& own = call_.value->as_tensor().view();
    offer_merge(*call_.merge, own, record);
    if (call_.list.size() > 1 && std::holds_alternative<merge::Same>(*call_.merge)) {
      const XXH128_hash_t hash = hash_of(own, *call_.group);
      record.hash_low = hash.low64;
      record.hash_high = hash.high64;
    }
    if (!call_.is_first()) return;
    // The result is created before the other ranks depend on this one, so nothing can fail later.
    const TensorView target = reshaped(own, *call_.merge);
    result_ = call_.options->root_tensors == RootTensors::copy ? Tensor::copy_of(target) : Tensor::borrow(target);
  }
  void move(const Records&, ExchangeReport&) override {}
  std::vector<std::optional<Config>> deliver() override { return {Config(std::move(result_))}; }

 private:
  const GatherCall& call_;
  Tensor result_;
};

}  // namespace

bool moves_elements(const GatherCall& call) {
  return call.list.size() > 1 && (call.merge == nullptr || merge_moves(merge_number(*call.merge)));
}

std::unique_ptr<Transfer> begin_transfer(const RouteDriver& driver, const GatherCall& call) {
  if (call.merge != nullptr && !moves_elements(call)) return std::make_unique<UnmovedMerge>(call);
  return driver.begin(call);
}

std::vector<std::byte> receive_of(const GatherCall& call, int from, std::uint64_t most, const char* phase) {
  for (;;) {
    std::vector<std::byte> message = call.group->receive(from, most, call.wait(phase), group::Subject::exchange);
    std::uint64_t exchange = 0;
    if (message.size() < sizeof exchange) throw Error(ErrorKind::corrupt, "malformed message of a rank: too short");
    std::memcpy(&exchange, message.data(), sizeof exchange);
    if (exchange == call.number) return message;
  }
}

bool RouteDriver::moves(const TensorView& tensor) const {
  return !tensor.is_contiguous() || !detail::ArenaCore::find(tensor.data(), tensor.nbytes());
}

RouteTable::RouteTable() {
  add(std::make_unique<LocalRoute>());
  add(make_shm_route());
  add(make_workspace_route());
}

RouteTable& RouteTable::instance() {
  static RouteTable table;
  return table;
}

void RouteTable::add(std::unique_ptr<RouteDriver> driver) {
  const std::lock_guard lock(adding_);
  const std::size_t count = count_.load(std::memory_order_relaxed);
  drivers_.at(count) = std::move(driver);
  count_.store(count + 1, std::memory_order_release);
}

void RouteTable::set_staging(std::unique_ptr<HostStaging> staging) {
  staging_.store(staging.release(), std::memory_order_release);
}

const RouteDriver* RouteTable::find(Route route) const noexcept {
  const auto known = drivers();
  const auto found = std::ranges::find_if(known, [&](const auto& driver) { return driver->route() == route; });
  return found == known.end() ? nullptr : found->get();
}

}  // namespace muster::gather
