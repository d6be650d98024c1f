// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/doctor_devices.hpp"

#include <fmt/core.h>

#include "muster/version.hpp"
#include "src/device/device_report.hpp"
#include "src/os/library.hpp"

namespace muster::inspect {
namespace {

constexpr const char* name = "CUDA";
constexpr const char* copy_first = "tensors on devices have to be copied to host memory before they are gathered";

}  // namespace

Finding examine_devices() {
  const std::string file = fmt::format("libmuster-cuda.so.{}", version());
  const os::LoadedLibrary library = os::load_library(reinterpret_cast<const void*>(&examine_devices), file);
  void* const symbol = library.handle == nullptr ? nullptr : os::find_symbol(library, cuda::report_symbol);
  if (symbol == nullptr)
    return {name, Health::note, fmt::format("{} is not here", file),
            fmt::format("{}, or install that library beside libmuster", copy_first)};
  CudaReport report;
  if (!reinterpret_cast<cuda::MakeReport>(symbol)(report))
    return {name, Health::warning, "a driver that does not answer", report.obstacle};
  if (!report.obstacle.empty()) return {name, Health::note, "no devices", report.obstacle};
  std::string value = fmt::format("driver for CUDA {}", report.driver);
  for (const std::string& device : report.devices) value += "; " + device;
  if (!report.nccl.empty()) return {name, Health::good, fmt::format("{}; NCCL {}", value, report.nccl)};
  return {name, Health::good, fmt::format("{}; no NCCL", value),
          fmt::format("between devices of several hosts tensors go through host memory: {}", report.nccl_obstacle)};
}

}  // namespace muster::inspect
