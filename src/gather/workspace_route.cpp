// SPDX-License-Identifier: Apache-2.0
// The workspace route as the exchange sees it, and what a rank keeps for it.

#include <fmt/core.h>

#include <algorithm>

#include "src/core/quoted.hpp"
#include "src/gather/merge_record.hpp"
#include "src/gather/workspace_state.hpp"
#include "src/os/directory.hpp"
#include "src/workspace/file_group.hpp"
#include "src/workspace/gc.hpp"

namespace muster::gather {

PassingFile::~PassingFile() {
  if (path_.empty() || owner_pid_ != os::process_id()) return;
  try {
    os::remove_file(path_);
  } catch (const std::exception&) {
    // Its name tells whose it is: a clean-up finds it.
  }
}

std::shared_ptr<WorkspaceRouteState> workspace_state_of(SyncGroup& group) {
  static const char key = 0;
  return std::static_pointer_cast<WorkspaceRouteState>(
      group.extension(&key, [] { return std::make_shared<WorkspaceRouteState>(); }));
}

std::string workspace_path_of(const Call& call) {
  if (!call.options->workspace_path.empty()) return call.options->workspace_path;
  if (const auto* group = dynamic_cast<const workspace::FileGroup*>(call.group)) return group->workspace_path();
  return {};
}

const workspace::WorkspaceDirectory& workspace_of(const Call& call, WorkspaceRouteState& state) {
  const std::string path = workspace_path_of(call);
  const auto found = state.directories.find(path);
  if (found != state.directories.end()) return found->second;
  workspace::WorkspaceDirectory directory = workspace::prepare_workspace(path);
  if (call.is_first()) workspace::sweep_dead(directory.path);
  return state.directories.emplace(path, std::move(directory)).first->second;
}

namespace {

class WorkspaceRoute final : public RouteDriver {
 public:
  [[nodiscard]] Route route() const noexcept override { return Route::workspace; }
  [[nodiscard]] bool is_usable(const Call& call) const override { return !workspace_path_of(call).empty(); }
  [[nodiscard]] std::string obstacle(const Call&) const override {
    return "no workspace_path is given (a directory that all ranks see)";
  }
  [[nodiscard]] std::string reason(const Call& call) const override {
    return fmt::format("the ranks share nothing but the workspace {}", in_quotes(workspace_path_of(call)));
  }
  [[nodiscard]] bool moves(const TensorView&) const override { return true; }
  std::unique_ptr<Proof> prove(const Call& call, Record& record) const override {
    const bool moves = call.list.size() > 1 && (call.merge == nullptr || merge_moves(merge_number(*call.merge)));
    return moves ? make_workspace_proof(call, record) : nullptr;
  }
  std::unique_ptr<Transfer> begin(const Call& call) const override {
    return call.operation == Operation::merge ? make_workspace_merge(call) : make_workspace_transfer(call);
  }
  std::uint64_t settle(SyncGroup& group, Keep) const override {
    // Streams of before: what the first rank has not taken it will not take any more.
    workspace_state_of(group)->under_way.clear();
    return 0;
  }
  std::uint64_t trim(SyncGroup&) const override { return 0; }
  void clean_up(SyncGroup&) const noexcept override {}
};

}  // namespace

std::unique_ptr<RouteDriver> make_workspace_route() {
  return std::make_unique<WorkspaceRoute>();
}

}  // namespace muster::gather
