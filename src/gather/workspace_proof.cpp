// SPDX-License-Identifier: Apache-2.0
// Step 1 of workspace_state.hpp: do all ranks of a list see one directory?

#include <fmt/core.h>

#include <algorithm>
#include <charconv>

#include "src/core/quoted.hpp"
#include "src/gather/workspace_state.hpp"
#include "src/os/directory.hpp"
#include "src/os/process.hpp"
#include "src/os/publish.hpp"
#include "src/sync/settings.hpp"
#include "src/workspace/discovery.hpp"
#include "src/workspace/names.hpp"

namespace muster::gather {
namespace {

class WorkspaceProof final : public Proof {
 public:
  WorkspaceProof(const Call& call, Record& record) : call_(call), state_(workspace_state_of(*call.group)) {
    path_ = workspace_path_of(call);
    const workspace::WorkspaceDirectory& directory = workspace_of(call, *state_);
    const bool is_known = std::ranges::all_of(call.list, [&](int rank) {
      return rank == call.group->rank() || (!call.is_first() && rank != call.first()) ||
             state_->proved.contains({path_, rank});
    });
    if (is_known) return;
    record.proves = true;
    if (!call.is_first()) return;
    workspace::Name name{.kind = workspace::NameKind::token,
                         .job = workspace::job_text(call.group->nonce()),
                         .rank = call.group->rank(),
                         .random = os::random_hex(8),
                         .writer = os::own_identity()};
    token_ = PassingFile(directory.path + "/" + workspace::file_name(name));
    os::write_new_file(token_.path(), {});
    std::from_chars(name.random.data(), name.random.data() + name.random.size(), record.segment, 16);
  }

  void check(std::span<const Record> records) override {
    if (!call_.is_sender()) return;
    const Record& first = records[static_cast<std::size_t>(call_.first())];
    if (!first.proves) {
      if (!records[static_cast<std::size_t>(call_.group->rank())].proves) return;
      throw Error(ErrorKind::argument,
                  fmt::format("rank {} goes by the workspace {} now, and rank {} still by the one of "
                              "before: change the path on all ranks, or on none",
                              call_.group->rank(), in_quotes(path_), call_.first()));
    }
    find(fmt::format("{:016x}", first.segment));
  }

  void commit() noexcept override {
    token_ = PassingFile();
    try {
      for (const int rank : call_.list)
        if (call_.is_first() || rank == call_.first()) state_->proved.emplace(path_, rank);
    } catch (const std::bad_alloc&) {
      // It is proved again next time.
    }
  }

 private:
  void find(const std::string& random) const {
    const workspace::WorkspaceDirectory& directory = workspace_of(call_, *state_);
    const auto is_token = [&](const os::DirectoryEntry& entry) {
      const auto name = workspace::parse_name(entry.name);
      return name && name->kind == workspace::NameKind::token && name->random == random;
    };
    const auto longest =
        std::min(sync::timeout_of(call_.options->timeout, call_.group->timeout()), workspace::longest_lateness);
    const std::string place = directory.path + "/token";
    try {
      workspace::patiently(place,
                           {.deadline = std::chrono::steady_clock::now() + longest,
                            .check =
                                [&] {
                                  call_.group->progress();
                                  check_group();
                                }},
                           [&] {
                             // By listing: its full name has the first rank's process in it.
                             if (std::ranges::none_of(os::list_directory(directory.path), is_token))
                               throw Error(ErrorKind::not_found, "no token");
                           });
    } catch (const Error& error) {
      check_group();
      if (error.kind() != ErrorKind::not_found) throw;
      // A token goes with its rank; the round that follows misses that one.
      if (call_.group->liveness(call_.first())->is_dead()) return;
      const RankInfo& own = call_.group->info(call_.group->rank());
      const RankInfo& first = call_.group->info(call_.first());
      throw Error(
          ErrorKind::argument,
          fmt::format("rank {} (host {}) does not see in the workspace {} what rank {} (host {}) has just written "
                      "there: it is not one directory; name one that all hosts mount",
                      own.rank, own.host, in_quotes(path_), first.rank, first.host),
          {.path = directory.path});
    }
  }

  /// The first rank takes its token back when the group fails.
  void check_group() const {
    if (const auto failure = call_.group->failure()) throw *failure;
  }

  const Call& call_;
  std::shared_ptr<WorkspaceRouteState> state_;
  std::string path_;
  PassingFile token_;
};

}  // namespace

std::unique_ptr<Proof> make_workspace_proof(const Call& call, Record& record) {
  return std::make_unique<WorkspaceProof>(call, record);
}

}  // namespace muster::gather
