// SPDX-License-Identifier: Apache-2.0
#pragma once
// What `muster doctor` says about devices.

#include "src/inspect/doctor.hpp"

namespace muster::inspect {

/// Loads libmuster-cuda, and starts the driver, where they are.
Finding examine_devices();

}  // namespace muster::inspect
