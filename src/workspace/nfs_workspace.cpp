// SPDX-License-Identifier: Apache-2.0
// NFSWorkspace: each rank's states in a directory that all ranks see.
//
//  1. Writing: a state file grows under a growing name and gets the name of its rank and generation in one step; that
//     name was never used before, and is never used again. Then earlier generations of this rank go, but those to keep.
//  2. Reading: the directory is listed (with a probe before it where other hosts write), the newest name that fits is
//     opened. Where it has gone meanwhile, the rank has written more: listed again. What looks old, short or stale is
//     tried again until the deadline (discovery.hpp).

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

#include "muster/state_file.hpp"
#include "muster/workspace.hpp"
#include "src/core/quoted.hpp"
#include "src/os/small_file.hpp"
#include "src/sync/settings.hpp"
#include "src/workspace/discovery.hpp"
#include "src/workspace/gc.hpp"
#include "src/workspace/names.hpp"
#include "src/workspace/workspace_directory.hpp"

namespace muster {

/// The count of one rank's states in one directory, whatever object writes them: no generation comes twice in a job.
struct detail::WorkspaceGenerations {
  std::atomic<std::uint64_t> last{0};
  bool is_network = false;
};

namespace {

using workspace::Name;
using workspace::NameKind;

struct AllGenerations {
  std::mutex mutex;
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::shared_ptr<detail::WorkspaceGenerations>> by_directory;
};

std::shared_ptr<detail::WorkspaceGenerations> generations_of(SyncGroup& group,
                                                             const workspace::WorkspaceDirectory& directory) {
  static const char key = 0;
  const auto all = std::static_pointer_cast<AllGenerations>(
      group.extension(&key, [] { return std::make_shared<AllGenerations>(); }));
  const auto status = os::file_status(directory.path, os::Links::followed);
  if (!status) throw Error(ErrorKind::not_found, fmt::format("the workspace {} is gone", in_quotes(directory.path)));
  const std::lock_guard lock(all->mutex);
  auto& generations = all->by_directory[{status->identity.device, status->identity.number}];
  if (!generations) generations = std::make_shared<detail::WorkspaceGenerations>();
  generations->is_network = directory.is_network;
  return generations;
}

/// This job's states of a rank that a listing shows, oldest first.
std::vector<Name> states_of(const std::string& path, bool is_network, const std::string& job, int rank) {
  std::vector<Name> states;
  for (const os::DirectoryEntry& entry : workspace::fresh_listing(path, is_network)) {
    const auto name = workspace::parse_name(entry.name);
    if (name && name->kind == NameKind::state && name->job == job && name->rank == rank) states.push_back(*name);
  }
  std::ranges::sort(states, {}, &Name::generation);
  return states;
}

bool has_tensors(const Config& config) {
  switch (config.type()) {
    case Config::Type::tensor:
      return true;
    case Config::Type::array:
      return std::ranges::any_of(config.as_array(), has_tensors);
    case Config::Type::object:
      return std::ranges::any_of(config.as_object(), [](const auto& member) { return has_tensors(member.second); });
    default:
      return false;
  }
}

}  // namespace

NFSWorkspace::NFSWorkspace(const std::optional<std::string>& path, std::shared_ptr<SyncGroup> group,
                           const WorkspaceOptions& options)
    : options_(options) {
  if (options.generations_kept < 1)
    throw Error(ErrorKind::argument, "a workspace must keep at least one generation: what was written last");
  if (!path || path->empty()) return;
  const workspace::WorkspaceDirectory directory = workspace::prepare_workspace(*path);
  std::shared_ptr<SyncGroup> owner = group ? std::move(group) : world();
  if (owner->rank() == 0) workspace::sweep_dead(directory.path);
  generations_ = generations_of(*owner, directory);
  const std::string job = workspace::job_text(owner->nonce());
  for (const Name& state : states_of(directory.path, directory.is_network, job, owner->rank())) {
    generations_->last = std::max(generations_->last.load(), state.generation);
    os::remove_file(directory.path + "/" + workspace::file_name(state));
  }
  path_ = directory.path;
  group_ = std::move(owner);
}

void NFSWorkspace::require_initialized() const {
  if (!is_initialized())
    throw Error(ErrorKind::argument, "this workspace is not initialised: it was made without a path");
}

std::uint64_t NFSWorkspace::write_configs_and_weights(const Config& config, std::span<const NamedTensor> weights) {
  require_initialized();
  if (!weights.empty() && has_tensors(config))
    throw Error(ErrorKind::argument,
                "the config has tensors at its leaves, and weights are given beside it: put all of them into one");
  std::optional<State> own;
  if (weights.empty()) {
    own = split(config);
    weights = own->weights;
  }
  Name name{.kind = NameKind::state,
            .job = workspace::job_text(group_->nonce()),
            .rank = group_->rank(),
            .world_size = group_->size(),
            .generation = generations_->last.fetch_add(1) + 1};
  StateFileOptions options;
  options.info = {
      .job = group_->nonce(), .generation = name.generation, .rank = name.rank, .world_size = name.world_size};
  options.zstd_level = options_.zstd_level;
  options.durable = options_.durable;
  options.temporary = workspace::growing_name();
  write_state_file(path_ + "/" + workspace::file_name(name), own ? own->config : config, weights, options);
  forget_earlier();
  return name.generation;
}

void NFSWorkspace::forget_earlier() const {
  try {
    // This rank's own files: no server has to be asked for what others did.
    auto states = states_of(path_, false, workspace::job_text(group_->nonce()), group_->rank());
    const auto kept = static_cast<std::size_t>(options_.generations_kept);
    if (states.size() <= kept) return;
    states.resize(states.size() - kept);
    for (const Name& state : states) os::remove_file(path_ + "/" + workspace::file_name(state));
  } catch (const Error&) {
    // The new state is there; the earlier ones go with the next.
  }
}

std::optional<WorkspaceState> NFSWorkspace::read_configs_and_weights_from_rank(int rank, std::uint64_t at_least) {
  require_initialized();
  (void)group_->info(rank);
  const std::string job = workspace::job_text(group_->nonce());
  std::optional<WorkspaceState> found;
  std::optional<Error> gone;
  const workspace::Patience patience{
      .deadline = std::chrono::steady_clock::now() + sync::timeout_of(options_.timeout, group_->timeout()),
      .check = [&] { group_->progress(); }};
  // Any path in the directory: patience is with the directory.
  workspace::patiently(path_ + "/states", patience, [&] {
    std::vector<Name> states;
    try {
      states = states_of(path_, generations_->is_network, job, rank);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::not_found) throw;
      gone = error.with_context(fmt::format("the workspace {} is gone", in_quotes(path_)));
      return;
    }
    if (states.empty() || states.back().generation < at_least) return;
    const Name& newest = states.back();
    const std::string path = path_ + "/" + workspace::file_name(newest);
    const StateFile file = StateFile::open(path);
    const StateFileInfo& info = file.info();
    if (info.job != group_->nonce() || info.rank != rank || info.generation != newest.generation)
      throw Error(ErrorKind::corrupt,
                  fmt::format("{} says that it is rank {}, generation {} of job {}: it was renamed or copied",
                              in_quotes(path), info.rank, info.generation, workspace::job_text(info.job)),
                  {.path = path});
    found = WorkspaceState{file.load(), info.generation, path};
  });
  if (gone) throw *gone;
  return found;
}

}  // namespace muster
