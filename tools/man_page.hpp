// SPDX-License-Identifier: Apache-2.0
#pragma once
// The manual page, as roff for man(1).

#include <string>

#include "tools/app_description.hpp"

namespace muster::tools {

std::string man_page(const AppDescription& app);

}  // namespace muster::tools
