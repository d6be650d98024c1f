// SPDX-License-Identifier: Apache-2.0
#pragma once
// The launchers of a job on several hosts, one on each, as a group of their own:
//  1. They meet by TCP at node 0's address, and tell each other how many ranks each starts. Node 0 tells the job's key,
//     and where the ranks meet: it listens there already, and its first rank inherits the socket.
//  2. While the ranks run, a thread makes a round of all launchers several times a second, and at once if there is
//     something to tell: that this node's ranks have ended, or that one of them has failed. A launcher that dies is
//     noticed by its connection.
//  3. When the ranks of all nodes have ended, the rounds end.

#include <array>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "muster/launch.hpp"
#include "muster/sync_group.hpp"
#include "src/base/written.hpp"
#include "src/os/fd.hpp"
#include "src/os/thread.hpp"

namespace muster::launch {

/// A TCP port that nobody else gets as long as `holder` lives: it is bound and does not listen, so that a program that
/// sets SO_REUSEADDR, as torch does, can listen there.
struct ReservedPort {
  os::Fd holder;
  int number = 0;
};
/// `wanted`: 0 for any. Empty if it is another program's.
std::optional<ReservedPort> reserve_port(int wanted);

/// Where the ranks of one launcher are among all of the job, and where they meet.
struct Place {
  int rank_offset = 0;
  int world_size = 1;
  int node = 0;
  std::string job;
  std::string master_address = "127.0.0.1";
  int master_port = 0;
  /// Of ranks that meet by TCP; 0: they do not.
  int meeting_port = 0;
  /// Listens at meeting_port: rank 0 inherits it. Empty on other nodes.
  os::Fd listener;
  std::optional<ReservedPort> reserved;  ///< master_port
};

/// Listens for ranks, on all addresses. `port`: 0 for any. Throws Error(io).
os::Fd listen_for_ranks(int port);

class Nodes {
 public:
  /// Collective over the launchers: steps 1. Throws Error(argument) on options that cannot be, and as tcp_group().
  Nodes(const LaunchNodes& options, int ranks);
  ~Nodes();
  Nodes& operator=(Nodes&&) = delete;
  /// This node's.
  [[nodiscard]] Place take_place() { return std::move(place_); }

  /// Step 2.
  void start();
  /// Readable if news() has something.
  [[nodiscard]] int descriptor() const noexcept { return bell_.get(); }
  struct News {
    bool all_ended = false;
    int status = 0;     ///< not 0: ranks of another node have failed, or its launcher is lost
    std::string words;  ///< which, and how
  };
  News news();
  /// Ends the rounds of all launchers: this one cannot go on. Any thread.
  void give_up(const Error& cause) noexcept { group_->poison(cause); }
  /// This node's ranks have ended or, if `status` is not 0, failed; `words` say how.
  void tell(bool has_ended, int status, const std::string& words);

 private:
  struct Record {
    std::uint32_t has_ended = 0;
    std::int32_t status = 0;
    std::array<char, 480> words{};
  };
  void run();
  void ring() noexcept;

  std::shared_ptr<SyncGroup> group_;
  Place place_;
  os::Fd bell_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Record mine_;
  bool is_new_ = false;  // mine_ has not been told yet
  bool stops_ = false;
  News news_;
  os::Thread thread_;
};

}  // namespace muster::launch
