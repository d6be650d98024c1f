// SPDX-License-Identifier: Apache-2.0
#pragma once
// FileGroup: processes that meet in a directory.
//
// A round (barrier, all-gather): 2 small files a rank at most, and each rank opens one:
//  1. Each rank but rank 0 publishes its record under a name that says round, rank and length.
//  2. Rank 0 lists until all are there, reads them (none where they are empty), and publishes all of them as one file.
//  3. The others list until that is there, and read it.
//  4. Rank 0 removes the records of the round, and what it published in the round before: all have come past it.
// A message is a file that its receiver removes. Waits list the directory with growing pauses, and between them look
// for the dead, the cancelled and the deadline (watchdog.hpp).

#include <map>
#include <memory>
#include <vector>

#include "src/sync/watchdog.hpp"
#include "src/workspace/group_directory.hpp"

namespace muster::workspace {

class FileGroup final : public sync::Group {
 public:
  /// `members`: the job's ranks that it has, in the order that they have here; `rank`: this one's place among them.
  /// `parent`: of a companion, else null.
  FileGroup(std::shared_ptr<Heart> heart, std::vector<int> members, int rank, std::shared_ptr<GroupPulse> parent,
            int number, Nonce nonce, std::chrono::milliseconds timeout);
  ~FileGroup() override;

  /// Only groups of this class are of this kind.
  static constexpr std::string_view kind_name = "file";
  [[nodiscard]] std::string_view kind() const noexcept override { return kind_name; }
  [[nodiscard]] bool shares_memory(int rank) const override {
    (void)info(rank);
    return rank == this->rank();
  }
  [[nodiscard]] int host_of(int rank) const override {
    (void)info(rank);
    return rank;
  }
  [[nodiscard]] std::shared_ptr<const sync::PeerLiveness> liveness(int rank) const override;
  void poison(const Error& cause) noexcept override { pulse_->poison(cause); }
  [[nodiscard]] std::optional<Error> failure() const override;
  void progress() noexcept override { (parent_ ? parent_ : pulse_)->progress(); }
  /// The workspace that the ranks have in common.
  [[nodiscard]] const std::string& workspace_path() const noexcept { return directory_->options().workspace; }

 protected:
  void do_barrier(const WaitOptions& options) override { (void)round({}, options); }
  void do_all_gather(std::span<const std::byte> mine, std::span<std::byte> all, const WaitOptions& options) override;
  void do_send(int to, sync::Subject subject, std::span<const std::byte> message, const WaitOptions& options) override;
  std::vector<std::byte> do_receive(int from, sync::Subject subject, std::uint64_t most,
                                    const WaitOptions& options) override;
  void do_wait_until(const std::function<bool()>& done, const std::function<void(std::chrono::nanoseconds)>& sleep,
                     std::span<const int> on, const WaitOptions& options) override;
  std::shared_ptr<sync::Group> make_part(const Part& part, Tie tie, const WaitOptions& options) override;

 private:
  class Members;
  [[nodiscard]] auto in_phase(const WaitOptions& options);
  std::vector<std::byte> round(std::span<const std::byte> record, const WaitOptions& options);
  std::vector<std::byte> collect(std::uint64_t number, std::span<const std::byte> record, const WaitOptions& options);
  std::vector<std::byte> wait_for_all(std::uint64_t number, std::uint64_t length, const WaitOptions& options);
  template <class Done, class Needed, class Awaited>
  void wait(const WaitOptions& options, const Done& done, const Needed& needed, const Awaited& awaited);
  std::shared_ptr<const Snapshot> look(bool with_probe);
  [[nodiscard]] std::chrono::milliseconds timeout_of(const WaitOptions& options) const;
  [[nodiscard]] sync::Watchdog watchdog(const WaitOptions& options) const;

  std::shared_ptr<Heart> heart_;
  std::shared_ptr<GroupDirectory> directory_;
  std::shared_ptr<const Members> members_;
  std::shared_ptr<GroupPulse> parent_;
  std::shared_ptr<GroupPulse> pulse_;
  int number_;
  std::uint64_t round_ = 0;
  std::string last_all_;  // on rank 0
  // Messages, by rank and subject.
  std::map<std::pair<int, sync::Subject>, std::uint64_t> sent_;
  std::map<std::pair<int, sync::Subject>, std::uint64_t> received_;
};

}  // namespace muster::workspace
