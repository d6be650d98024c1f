// SPDX-License-Identifier: Apache-2.0
#include <muster/muster.hpp>

#include <cstdio>

int main() {
  const auto group = muster::world();  // one process, if nothing has started ranks
  const muster::Config config = muster::Config::object({{"name", "layer"}});
  const auto all = muster::get_configs_parallel(&config, muster::all_ranks, *group);
  for (const auto& [rank, gathered] : all.present())
    std::printf("rank %d: %s\n", rank, gathered.at("name").as_string().c_str());
}
