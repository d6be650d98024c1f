// SPDX-License-Identifier: Apache-2.0
#include "src/collectives/device_backend.hpp"

#include <fmt/core.h>

#include <atomic>

#include "muster/error.hpp"

namespace muster::collectives {
namespace {

std::atomic<MakeDeviceBackend> make_device_backend{nullptr};

}  // namespace

std::string Place::words() const {
  if (count == 0) return {};
  std::string text = count == 1 ? " on a device" : fmt::format(" on {} devices of each rank", count);
  return is_captured ? text + ", captured into a graph" : text;
}

void set_device_backend(MakeDeviceBackend make) noexcept {
  make_device_backend = make;
}

bool has_device_backend() noexcept {
  return make_device_backend.load() != nullptr;
}

std::unique_ptr<DeviceBackend> device_backend(sync::Group& group, Backend& round) {
  const MakeDeviceBackend make = make_device_backend;
  if (make == nullptr)
    throw Error(ErrorKind::unsupported,
                "collectives take tensors on devices only in a program that is linked with libmuster-cuda (pkg-config "
                "muster-cuda): link it, or copy them to the host first");
  return make(group, round);
}

}  // namespace muster::collectives
