// SPDX-License-Identifier: Apache-2.0
// The workspace route as the exchange sees it, and what a rank keeps for it.

#include <fmt/core.h>

#include <algorithm>

#include "src/core/quoted.hpp"
#include "src/gather/merge_record.hpp"
#include "src/gather/route.hpp"
#include "src/gather/workspace_state.hpp"
#include "src/merge/reduce.hpp"
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
  return sync::inside(group).extension<WorkspaceRouteState>();
}

std::string workspace_path_of(const Call& call) {
  if (!call.options->workspace.path.empty()) return call.options->workspace.path;
  if (call.group->kind() != workspace::FileGroup::kind_name) return {};
  return static_cast<const workspace::FileGroup*>(call.group)->workspace_path();
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
    return "no workspace.path is given (a directory that all ranks see)";
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

// Configs and tensors through a workspace.

namespace {

class WorkspaceTransfer final : public Transfer {
 public:
  explicit WorkspaceTransfer(const Call& call) : call_(call), state_(workspace_state_of(*call.group)) {
    if (call.value != nullptr && call.is_member()) own_.emplace(call, *state_);
  }

  void offer(Record& record) override {
    if (own_) own_->offer(record);
  }
  void move(std::span<const Record> records, ExchangeReport&) override {
    const bool writes = own_ && (call_.is_sender() || call_.options->workspace.keep_files);
    if (writes && call_.is_sender()) own_->send();
    if (!call_.is_first()) return;
    entries_ = ReceivedFiles(call_, *state_).receive(records);
    if (writes) own_->send();
  }
  void commit() noexcept override {
    if (own_) own_->commit();
  }
  std::vector<std::optional<Config>> deliver() override {
    if (entries_.empty()) entries_.resize(call_.list.size());
    return std::move(entries_);
  }
  std::vector<std::unique_ptr<Obligation>> obligations() override {
    std::vector<std::unique_ptr<Obligation>> all;
    if (own_ && call_.is_part && call_.is_sender()) all.push_back(own_->obligation());
    return all;
  }
  [[nodiscard]] std::uint64_t pool_bytes() const noexcept override { return 0; }

 private:
  const Call& call_;
  std::shared_ptr<WorkspaceRouteState> state_;
  std::optional<SentFile> own_;
  std::vector<std::optional<Config>> entries_;
};

}  // namespace

std::unique_ptr<Transfer> make_workspace_transfer(const Call& call) {
  return std::make_unique<WorkspaceTransfer>(call);
}

// Merges through a workspace: the first rank reads all members' files and merges them in its memory. The others' bytes
// are there once as files, so nothing is gained by writing straight into the result as over shared memory.

namespace {

class WorkspaceMerge final : public Transfer {
 public:
  explicit WorkspaceMerge(const Call& call)
      : call_(call), state_(workspace_state_of(*call.group)), own_(call, *state_) {}

  void offer(Record& record) override {
    own_.offer(record);
    const TensorView& own = call_.value->as_tensor().view();
    record.merge = merge_number(*call_.merge);
    record.payload_bytes = record.moving_bytes = own.nbytes();
    record.closes = true;
    record.facts[fact_extent] =
        static_cast<std::uint64_t>(merge_extent(*call_.merge, TensorSpec{own.dtype(), own.shape()}));
  }
  void move(std::span<const Record> records, ExchangeReport&) override {
    if (call_.is_sender()) own_.send();
    if (!call_.is_first()) return;
    const std::vector<std::optional<Config>> others = ReceivedFiles(call_, *state_).receive(records);
    if (call_.options->workspace.keep_files) own_.send();
    std::vector<TensorView> sources{call_.value->as_tensor().view()};
    for (std::size_t position = 1; position < others.size(); ++position) {
      // A sender that failed says why in its own status.
      if (!others[position]) return;
      sources.push_back(others[position]->as_tensor().view());
    }
    result_ = merge::merge_in_memory(*call_.merge, sources, call_.list, [&] { call_.group->progress(); });
  }
  void commit() noexcept override { own_.commit(); }
  std::vector<std::optional<Config>> deliver() override {
    std::vector<std::optional<Config>> entries(1);
    entries.front() = Config(std::move(result_));
    return entries;
  }
  [[nodiscard]] std::uint64_t pool_bytes() const noexcept override { return 0; }

 private:
  const Call& call_;
  std::shared_ptr<WorkspaceRouteState> state_;
  SentFile own_;
  Tensor result_;
};

}  // namespace

std::unique_ptr<Transfer> make_workspace_merge(const Call& call) {
  if (call.list.size() == 1 || !merge_moves(merge_number(*call.merge))) return make_unmoved_merge(call);
  return std::make_unique<WorkspaceMerge>(call);
}

}  // namespace muster::gather
