// SPDX-License-Identifier: Apache-2.0
#pragma once
// The second pass over a foreign file: attributes and datasets of text.

#include <hdf5.h>

#include <vector>

#include "src/hdf5/foreign_listing.hpp"
#include "src/hdf5/foreign_report_writer.hpp"

namespace muster::hdf5 {

/// Throws ReportFull, std::bad_alloc.
void report_texts(hid_t file, const std::vector<ObjectToRead>& objects, ReportWriter& report);

}  // namespace muster::hdf5
