// SPDX-License-Identifier: Apache-2.0
#include "src/sync/rendezvous_packets.hpp"

#include <thread>

#include "src/base/fixed_text.hpp"
#include "src/os/process.hpp"

namespace muster::sync {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

}  // namespace

void send_until(const os::Fd& socket, std::span<const std::byte> bytes, std::span<const int> descriptors,
                Clock::time_point deadline, int to) {
  for (;;) {
    const os::SocketStatus status = os::send_packet(socket, bytes, descriptors);
    if (status == os::SocketStatus::done) return;
    if (status == os::SocketStatus::closed)
      throw Error(ErrorKind::peer_lost, fmt::format("rendezvous: rank {} died or hung up", to), {.rank = to});
    if (Clock::now() > deadline)
      throw Error(ErrorKind::timeout, fmt::format("rendezvous: rank {} does not take its messages", to), {.rank = to});
    // If it is descriptors under way that are too many, the socket itself has room.
    os::wait_writable(socket, milliseconds(20));
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

Hello own_hello(int rank, int size) {
  Hello hello;
  put_text(hello.version, version());
  hello.rank = rank;
  hello.size = size;
  hello.pid = os::process_id();
  put_text(hello.host, os::host_name());
  return hello;
}

Error from_answer(const Answer& answer) {
  ErrorDetails details;
  if (answer.error_rank >= 0) details.rank = answer.error_rank;
  return Error(static_cast<ErrorKind>(answer.error_kind), get_text(answer.text), details);
}

}  // namespace muster::sync
