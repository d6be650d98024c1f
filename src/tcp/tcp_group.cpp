// SPDX-License-Identifier: Apache-2.0
// tcp_group(), and how its groups end with the process.

#include "muster/tcp.hpp"

#include <fmt/core.h>

#include <cstdlib>
#include <mutex>

#include "src/hosts/hosts_group.hpp"
#include "src/hosts/link.hpp"
#include "src/os/process.hpp"
#include "src/sync/registered.hpp"
#include "src/sync/settings.hpp"
#include "src/tcp/meeting.hpp"

namespace muster {
namespace tcp {
namespace {

/// A connection that ends without a word is the loss of this rank: so the process leaves its groups before.
void end_with_process() {
  static std::once_flag once;
  std::call_once(once, [] { std::atexit([] { hosts::end_all(TcpTransport::kind_name); }); });
}

std::string key_of(const TcpGroupOptions& options) {
  if (!options.key.empty()) return options.key;
  if (const auto job = os::environment("MUSTER_JOB")) return "job " + *job;
  if (const auto run = os::environment("TORCHELASTIC_RUN_ID")) return "torchrun " + *run;
  return {};
}

[[maybe_unused]] const bool is_registered = [] {
  hosts::add_route(Route::tcp, "TCP", "make it with tcp_group()");
  sync::set_world_maker(sync::MeetBy::tcp, [](const sync::DistantWorld& world) {
    return tcp_group({.address = world.place, .rank = world.rank, .size = world.size, .key = world.key});
  });
  return true;
}();

}  // namespace
}  // namespace tcp

std::shared_ptr<SyncGroup> tcp_group(const TcpGroupOptions& options) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size)
    throw Error(ErrorKind::argument,
                fmt::format("tcp_group: rank {} of {} ranks cannot be", options.rank, options.size));
  const std::chrono::milliseconds timeout = sync::timeout_of(options.timeout, sync::default_timeout());
  hosts::advance_endings(tcp::TcpTransport::kind_name);
  const auto transport = tcp::meet({.address = options.address,
                                    .rank = options.rank,
                                    .size = options.size,
                                    .key = tcp::key_of(options),
                                    .timeout = timeout});
  tcp::end_with_process();
  return hosts::make_group(std::make_shared<hosts::Context>(transport, timeout), timeout, "tcp_group");
}

}  // namespace muster
