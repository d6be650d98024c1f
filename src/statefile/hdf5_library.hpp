// SPDX-License-Identifier: Apache-2.0
#pragma once
// libmuster-hdf5, loaded when a state file is first written: libhdf5 and what it needs take longer to load than most
// commands run.

#include <string>
#include <string_view>

#include "src/hdf5/metadata_plan.hpp"

namespace muster::statefile {

/// Loads the library unless it is there: the one of this version beside libmuster, else where the system looks. Throws
/// Error(unsupported).
void require_hdf5();

/// The plan's structures. Throws as require_hdf5, and Error(io) with libhdf5's words.
hdf5::Metadata make_metadata(const hdf5::MetadataPlan& plan);

/// A tensor's name as a link of an HDF5 group: the name itself, but for what HDF5 or a terminal would misread: "/",
/// "%", control characters, and the names "." and
/// ".." are percent-encoded. Different names give different links.
std::string link_name(std::string_view name);

}  // namespace muster::statefile
