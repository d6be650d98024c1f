// SPDX-License-Identifier: Apache-2.0
#include "src/device/stream_staging.hpp"

#include "src/device/device_state.hpp"
#include "src/device/staging.hpp"

namespace muster::cuda {
namespace {

/// Not that of the device route: what it has is no memory for slots, and is not counted as such.
std::shared_ptr<DeviceState> staging_state_of(SyncGroup& group) {
  static const char key = 0;
  return std::static_pointer_cast<DeviceState>(group.extension(&key, [] { return std::make_shared<DeviceState>(); }));
}

/// What fails in the middle leaves nothing in a stream that the next part would wait for.
template <class Work>
auto whole_or_dropped(DeviceState& state, const Work& work) {
  try {
    return work();
  } catch (...) {
    state.drop_queues();
    throw;
  }
}

class PartFiller final : public gather::SlotFiller {
 public:
  explicit PartFiller(const gather::Call& call) : state_(staging_state_of(*call.group)), filler_(call, *state_) {}
  void fill(const std::shared_ptr<shm::Slot>& slot, std::uint64_t bytes,
            std::span<const std::pair<std::uint64_t, const Tensor*>> tensors) override {
    whole_or_dropped(*state_, [&] { filler_.fill(slot, bytes, tensors); });
  }

 private:
  std::shared_ptr<DeviceState> state_;
  DeviceSlotFiller filler_;
};

class StreamStaging final : public gather::HostStaging {
 public:
  std::unique_ptr<gather::SlotFiller> filler(const gather::Call& call) const override {
    check_places(*call.value);
    return std::make_unique<PartFiller>(call);
  }
  Config to_host(const Config& part, SyncGroup& group, const WaitOptions& options) const override {
    check_places(part);
    DeviceState& state = *staging_state_of(group);
    return whole_or_dropped(state, [&] {
      HostCopy copy(part, state);
      copy.start();
      copy.finish(group, options);
      return copy.take();
    });
  }
  [[nodiscard]] std::uint64_t bytes(SyncGroup& group) const override { return staging_state_of(group)->bytes(); }
};

const bool is_staging_registered = [] {
  gather::RouteTable::instance().set_staging(std::make_unique<StreamStaging>());
  return true;
}();

}  // namespace

std::uint64_t trim_stream_staging(SyncGroup& group) noexcept {
  return staging_state_of(group)->trim();
}

}  // namespace muster::cuda
