// SPDX-License-Identifier: Apache-2.0
#pragma once
// libmuster-hdf5, loaded when a state file is first written: libhdf5 and what it needs take longer to load than most
// commands run.

#include "src/hdf5/metadata_plan.hpp"

namespace muster::statefile {

/// Loads the library unless it is there: the one of this version beside libmuster, else where the system looks. Throws
/// Error(unsupported).
void require_hdf5();

/// The plan's structures. Throws as require_hdf5, and Error(io) with libhdf5's words.
hdf5::Metadata make_metadata(const hdf5::MetadataPlan& plan);

}  // namespace muster::statefile
