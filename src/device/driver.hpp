// SPDX-License-Identifier: Apache-2.0
#pragma once
// The CUDA driver of this process: loaded when it is first asked for, never unloaded (it has threads and handlers of
// its own). Everything here is thread-safe.

#include <string>
#include <string_view>

#include "src/device/driver_api.hpp"

namespace muster::cuda {

/// The driver, started. Throws Error(unsupported) with the remedy where there is none, where it has no device, and in a
/// process that was forked from one that had used it: its devices cannot be reached from there.
const DriverFunctions& driver();
/// The same without an exception: null, and why in `reason`.
const DriverFunctions* find_driver(std::string* reason = nullptr) noexcept;

/// Throws where `status` is not success: Error(no_space) for memory, else Error(io), with `attempted` ("copying from
/// cuda:0 to page-locked memory") and the driver's own name and words.
void check(Status status, std::string_view attempted);
/// "CUDA_ERROR_OUT_OF_MEMORY: out of memory".
std::string words_of(Status status);

}  // namespace muster::cuda
