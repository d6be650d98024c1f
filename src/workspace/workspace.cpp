// SPDX-License-Identifier: Apache-2.0
// Workspace: each rank's states in a directory that all ranks can access.
//
//  1. Writing: a state file is written under a temporary name, and then gets the name of its rank and step in one
//     step. A rank's steps increase, so no name is used twice, except after a failed write.
//  2. After a write, earlier steps of this rank are deleted, except those to keep. File names show which
//     steps all ranks have. No file can appear below the newest step of the slowest rank, and only files
//     below it are deleted. So ranks that delete at the same moment, each by its own listing, cannot delete each
//     other's last common step.
//  3. Reading: the directory is listed (after a probe if other hosts write there), and the newest matching name is
//     opened. If it is missing by then, the rank has written a newer state, and the directory is listed again. Files
//     that look old, short or stale are retried until the deadline (discovery.hpp).

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>
#include <set>

#include "muster/state_file.hpp"
#include "muster/workspace.hpp"
#include "src/base/escaped.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/group/watchdog.hpp"
#include "src/os/clock.hpp"
#include "src/os/directory.hpp"
#include "src/trace/span.hpp"
#include "src/workspace/discovery.hpp"
#include "src/workspace/gc.hpp"
#include "src/workspace/names.hpp"

namespace muster {

/// One rank's last step in one directory, whichever object wrote it.
struct detail::WorkspaceSteps {
  std::optional<std::uint64_t> last;
  bool is_network = false;
};

namespace {

using workspace::Name;
using workspace::NameKind;

struct AllSteps {
  ForkMutex mutex;
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::shared_ptr<detail::WorkspaceSteps>> by_directory;
};

std::shared_ptr<detail::WorkspaceSteps> steps_of(Group& group, const workspace::WorkspaceDirectory& directory) {
  const auto all = group::inside(group).extension<AllSteps>();
  const auto status = os::file_status(directory.path, os::Links::followed);
  if (!status)
    throw Error(ErrorKind::not_found, fmt::format("workspace {} does not exist any more", in_quotes(directory.path)));
  const std::lock_guard lock(all->mutex);
  auto& steps = all->by_directory[{status->identity.device, status->identity.number}];
  if (!steps) steps = std::make_shared<detail::WorkspaceSteps>();
  steps->is_network = directory.is_network;
  return steps;
}

/// Returns the states in a listing, of all ranks of a job (empty: of all jobs), by step.
std::vector<Name> states_in(const std::string& path, bool is_network, const std::string& job) {
  std::vector<Name> states;
  for (const os::DirectoryEntry& entry : workspace::fresh_listing(path, is_network)) {
    const auto name = workspace::parse_name(entry.name);
    if (name && name->kind == NameKind::state && (job.empty() || name->job == job)) states.push_back(*name);
  }
  std::ranges::sort(states, {}, &Name::step);
  return states;
}

/// Selects a rank's state: the newest match of each job, and of several jobs the one written last.
std::optional<Name> choose(const std::string& path, const std::vector<Name>& states, int rank,
                           const WorkspaceQuery& query) {
  std::map<std::string, std::vector<Name>> jobs;
  for (const Name& state : states) jobs[state.job].push_back(state);
  std::optional<Name> chosen;
  std::chrono::system_clock::time_point written;
  for (const auto& [job, its_states] : jobs) {
    const auto fits = [&, &its_states = its_states](const Name& state) {
      return state.rank == rank && state.step >= query.min_step && (!query.step || state.step == *query.step) &&
             (!query.on_all_ranks || workspace::common_steps(its_states, state.world_size).contains(state.step));
    };
    const auto newest = std::find_if(its_states.rbegin(), its_states.rend(), fits);
    if (newest == its_states.rend()) continue;
    if (jobs.size() > 1) {
      const auto status = os::file_status(path + "/" + workspace::file_name(*newest));
      // The rank has written a newer state: list again.
      if (!status) throw os::errno_error("opening the state", ENOENT, path + "/" + workspace::file_name(*newest));
      if (chosen && status->changed <= written) continue;
      written = status->changed;
    }
    chosen = *newest;
  }
  return chosen;
}

/// Whether this rank cleans up for its host: the first rank of each host does.
bool sweeps(const Group& group) {
  const std::string& host = group.info(group.rank()).host;
  for (int rank = 0; rank < group.rank(); ++rank)
    if (group.info(rank).host == host) return false;
  return true;
}

void forget(const std::string& path) noexcept {
  try {
    os::remove_file(path);
  } catch (const Error&) {
    // The next write of this step replaces it.
  }
}

bool has_tensors(const Config& config) {
  bool has_any = false;
  for_each_leaf(config, [&](const Config& leaf) { has_any = has_any || leaf.is_tensor(); });
  return has_any;
}

}  // namespace

Workspace::Workspace(const std::optional<std::string>& path, std::shared_ptr<Group> group,
                     const WorkspaceOptions& options)
    : options_(options) {
  if (options.steps_kept < 1) throw Error(ErrorKind::invalid_argument, "steps_kept must be at least 1");
  if (!path || path->empty()) return;
  const workspace::WorkspaceDirectory directory = workspace::prepare_workspace(*path);
  std::shared_ptr<Group> owner = group ? std::move(group) : world();
  if (sweeps(*owner)) workspace::sweep_dead(directory.path);
  steps_ = steps_of(*owner, directory);
  path_ = directory.path;
  group_ = std::move(owner);
}

void Workspace::require_initialized() const {
  if (!is_initialized())
    throw Error(ErrorKind::invalid_argument, "the workspace is not initialised: it was made without a path");
}

std::uint64_t Workspace::write_configs_and_weights(const Config& config, std::span<const NamedTensor> weights,
                                                   std::optional<std::uint64_t> step) {
  require_initialized();
  const trace::Span span(trace::SpanKind::file, "write to workspace");
  if (!weights.empty() && has_tensors(config))
    throw Error(
        ErrorKind::invalid_argument,
        "the config has tensors, and weights were passed as well. Put all tensors into the config or into the weights");
  std::optional<State> own;
  if (weights.empty()) {
    own = split(config);
    weights = own->weights;
  }
  std::optional<std::uint64_t>& last = steps_->last;
  if (step && last && *step <= *last)
    throw Error(
        ErrorKind::invalid_argument,
        fmt::format(
            "workspace {1}: writing step {0}: rank {2} has written step {3}, and the steps of a job must ascend. To "
            "write earlier steps, make a workspace with a duplicate of the group, which counts as another job",
            *step, in_quotes(path_), group_->rank(), *last));
  Name name{.kind = NameKind::state,
            .job = workspace::job_text(group_->nonce()),
            .rank = group_->rank(),
            .world_size = group_->size(),
            .step = step ? *step : last.value_or(0) + 1};
  const StateFileOptions options{.info = {group_->nonce(), name.step, name.rank, name.world_size},
                                 .zstd_level = options_.zstd_level,
                                 .durable = options_.durable,
                                 .temporary = workspace::growing_name()};
  const std::string path = path_ + "/" + workspace::file_name(name);
  try {
    write_state_file(path, own ? own->config : config, weights, options);
  } catch (...) {
    // If syncing the directory was the failure, the state already has its final name.
    forget(path);
    throw;
  }
  last = name.step;
  forget_earlier();
  return name.step;
}

void Workspace::forget_earlier() const {
  try {
    // An old listing shows fewer files of other ranks, so less is deleted.
    const std::vector<Name> states = states_in(path_, false, workspace::job_text(group_->nonce()));
    std::map<int, std::uint64_t> newest;  // by rank
    std::vector<Name> own;
    for (const Name& state : states) {
      newest[state.rank] = state.step;
      if (state.rank == group_->rank()) own.push_back(state);
    }
    const auto kept = static_cast<std::size_t>(options_.steps_kept);
    if (own.size() <= kept) return;
    own.resize(own.size() - kept);
    const bool all_write = newest.size() == static_cast<std::size_t>(group_->size());
    const std::uint64_t slowest =
        std::ranges::min_element(newest, {}, [](const auto& rank) { return rank.second; })->second;
    const std::set<std::uint64_t> common = workspace::common_steps(states, group_->size());
    for (const Name& state : own) {
      const bool is_last_common = !common.empty() && state.step == *common.rbegin();
      if (!is_last_common && !(all_write && state.step >= slowest))
        os::remove_file(path_ + "/" + workspace::file_name(state));
    }
  } catch (const Error&) {
    // The new state exists; the next write deletes the earlier ones.
  }
}

std::optional<WorkspaceState> Workspace::read_configs_and_weights_from_rank(int rank, const WorkspaceQuery& query) {
  require_initialized();
  const trace::Span span(trace::SpanKind::file, "read from workspace");
  const bool is_own = query.job == WorkspaceJob::own;
  if (is_own) (void)group_->info(rank);
  std::optional<WorkspaceState> found;
  std::optional<Error> gone;
  const workspace::Patience patience{
      .deadline = os::Clock::now() + group::timeout_of(options_.timeout, group_->timeout()),
      .check = [&] { group_->progress(); }};
  // Any path in the directory will do: patiently() only needs its file system.
  workspace::patiently(path_ + "/states", patience, [&] {
    std::vector<Name> states;
    try {
      states = states_in(path_, steps_->is_network, is_own ? workspace::job_text(group_->nonce()) : "");
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::not_found) throw;
      gone = error.with_context(fmt::format("workspace {} does not exist any more", in_quotes(path_)));
      return;
    }
    const std::optional<Name> chosen = choose(path_, states, rank, query);
    if (!chosen) return;
    const std::string path = path_ + "/" + workspace::file_name(*chosen);
    const StateFile file = StateFile::open(path);
    const StateFileInfo& info = file.info();
    if (workspace::job_text(info.job) != chosen->job || info.rank != rank || info.step != chosen->step)
      throw Error(ErrorKind::corrupt,
                  fmt::format("{} was renamed or copied: its header records rank {}, step {} of job {}",
                              in_quotes(path), info.rank, info.step, workspace::job_text(info.job)),
                  {.path = path});
    found = WorkspaceState{file.load(), info.step, path, info.job, info.world_size};
  });
  if (gone) throw *gone;
  return found;
}

}  // namespace muster
