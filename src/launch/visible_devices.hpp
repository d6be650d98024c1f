// SPDX-License-Identifier: Apache-2.0
#pragma once
// Implements the rules of the CUDA driver for the variable CUDA_VISIBLE_DEVICES.

#include <algorithm>
#include <charconv>
#include <string_view>
#include <vector>

namespace muster::launch {

/// Returns the number of visible devices on a host that has `devices` devices, if CUDA_VISIBLE_DEVICES is `list`. As in
/// the driver, the list ends at the first entry that is not a device, so "-1" hides all devices. A device that is
/// listed twice also hides all devices. Entries such as "GPU-<uuid>" count as devices because only the driver can
/// resolve them.
inline int devices_in(std::string_view list, int devices) {
  std::vector<std::string_view> seen;
  while (!list.empty()) {
    std::string_view entry = list.substr(0, list.find(','));
    list.remove_prefix(std::min(list.size(), entry.size() + 1));
    entry.remove_prefix(std::min(entry.size(), entry.find_first_not_of(' ')));
    entry = entry.substr(0, entry.find(' '));
    int index = -1;
    const auto [end, error] = std::from_chars(entry.data(), entry.data() + entry.size(), index);
    const bool is_index = error == std::errc{} && end == entry.data() + entry.size();
    const bool is_name = entry.starts_with("GPU-") || entry.starts_with("MIG-");
    if (!is_name && (!is_index || index < 0 || index >= devices)) break;
    if (std::ranges::find(seen, entry) != seen.end()) return 0;
    seen.push_back(entry);
  }
  return std::min(devices, static_cast<int>(seen.size()));
}

}  // namespace muster::launch
