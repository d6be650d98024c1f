// SPDX-License-Identifier: Apache-2.0
#pragma once
// The page of a report (src/report/page/). The build makes these texts with make_page.py.

#include <string_view>

namespace muster::report {

extern const std::string_view page_head;  ///< up to the beginning of the data's JSON text
extern const std::string_view page_tail;  ///< from its end on

}  // namespace muster::report
