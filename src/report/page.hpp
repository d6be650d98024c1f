// SPDX-License-Identifier: Apache-2.0
#pragma once
// The page of a report. The build writes these texts with page/make_page.py.

#include <string_view>

namespace muster::report {

extern const std::string_view page_head;  ///< the page before the JSON text of the data
extern const std::string_view page_tail;  ///< the page after the JSON text of the data

}  // namespace muster::report
