// SPDX-License-Identifier: Apache-2.0
#pragma once
// The launchers of a job on several hosts, one per host, form a group of their own:
//
//  1. They form a TCP group at the address of node 0, and exchange the number of ranks that each of them starts. Node 0
//     sends the key of the job and the address of the ranks' rendezvous. It already listens there, and its first rank
//     inherits the socket.
//  2. While the ranks run, a thread makes rounds of all launchers several times per second. It makes one at once if
//     there is news: the ranks of this node have ended, or one of them has failed. If a launcher dies, the others
//     notice it by their connections.
//  3. When the ranks of all nodes have ended, the rounds end.

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "muster/group.hpp"
#include "muster/launch.hpp"
#include "src/base/fixed_string.hpp"
#include "src/os/fd.hpp"
#include "src/os/thread.hpp"

namespace muster::launch {

/// A TCP port that no other program gets while `holder` exists. The socket is bound but does not listen. So a program
/// that sets SO_REUSEADDR, as torch does, can listen at the port.
struct ReservedPort {
  os::Fd holder;
  int number = 0;
};
/// Reserves the port `wanted`, or any port for 0. Returns nullopt if another program uses it.
std::optional<ReservedPort> reserve_port(int wanted);

/// The position of the ranks of one launcher among all ranks of the job, and the address of their rendezvous.
struct NodePlace {
  int rank_offset = 0;
  int world_size = 1;
  int node = 0;
  std::string job;
  std::string master_address = "127.0.0.1";
  int master_port = 0;
  /// The port of the ranks' rendezvous by TCP; 0 if they do not use TCP.
  int meeting_port = 0;
  /// A socket that listens at meeting_port, which rank 0 inherits. Empty on other nodes.
  os::Fd listener;
  std::optional<ReservedPort> reserved;  ///< reserves master_port
};

/// Listens for ranks on all addresses at `port`, or at any port for 0. Throws Error(io).
os::Fd listen_for_ranks(int port);

class Nodes {
 public:
  /// The longest pause between two rounds.
  static constexpr std::chrono::milliseconds between_rounds{200};

  /// Step 1. Collective over the launchers. Throws Error(invalid_argument) for invalid options, and as tcp_group().
  Nodes(const LaunchNodes& options, int ranks);
  ~Nodes();
  Nodes& operator=(Nodes&&) = delete;
  /// Returns the place of this node.
  [[nodiscard]] NodePlace take_place() { return std::move(place_); }

  /// Step 2.
  void start();
  /// Returns a descriptor that is readable if news() has something to return.
  [[nodiscard]] int descriptor() const noexcept { return bell_.get(); }
  struct News {
    bool all_ended = false;
    int status = 0;     ///< not 0 if ranks of another node have failed, or if its launcher is lost
    std::string words;  ///< describes the failure
  };
  News news();
  /// Ends the rounds of all launchers, because this launcher has failed. Thread-safe.
  void give_up(const Error& cause) noexcept { group_->abort(cause); }
  /// Reports that this node's ranks have ended or, if `status` is not 0, have failed; `words` describes the failure.
  void tell(bool has_ended, int status, const std::string& words);

 private:
  struct EndRecord {
    std::uint32_t has_ended = 0;
    std::int32_t status = 0;
    std::array<char, 480> words{};
  };
  void run();
  void ring() noexcept;

  std::shared_ptr<Group> group_;
  NodePlace place_;
  os::Fd bell_;
  std::mutex mutex_;
  std::condition_variable changed_;
  EndRecord mine_;
  bool is_new_ = false;  // mine_ has not been sent yet
  bool stops_ = false;
  News news_;
  os::Thread thread_;
};

}  // namespace muster::launch
