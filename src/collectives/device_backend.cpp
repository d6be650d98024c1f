// SPDX-License-Identifier: Apache-2.0
#include "src/collectives/device_backend.hpp"

#include <atomic>

#include "muster/error.hpp"

namespace muster::collectives {
namespace {

std::atomic<MakeDeviceBackend> make_device_backend{nullptr};

}  // namespace

const char* words_of(Place place) noexcept {
  switch (place) {
    case Place::host:
      return "";
    case Place::device:
      return " on a device";
    case Place::captured:
      return " on a device, captured into a graph";
  }
  return "";
}

void set_device_backend(MakeDeviceBackend make) noexcept {
  make_device_backend = make;
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
