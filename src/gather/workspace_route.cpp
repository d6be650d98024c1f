// SPDX-License-Identifier: Apache-2.0
// The workspace route as the exchange sees it, and the state that a rank keeps for it. Step numbers are those of
// workspace_route.hpp.

#include "src/gather/workspace_route.hpp"
#include <fmt/core.h>
#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include "muster/state_file.hpp"
#include "src/base/escaped.hpp"
#include "src/gather/merge_record.hpp"
#include "src/gather/route.hpp"
#include "src/group/watchdog.hpp"
#include "src/merge/reduce.hpp"
#include "src/os/clock.hpp"
#include "src/os/directory.hpp"
#include "src/os/process.hpp"
#include "src/os/publish.hpp"
#include "src/workspace/discovery.hpp"
#include "src/workspace/gc.hpp"
#include "src/workspace/group_directory.hpp"
#include "src/workspace/names.hpp"

namespace muster::gather {

PassingFile::~PassingFile() {
  if (path_.empty() || owner_pid_ != os::process_id()) return;
  try {
    os::remove_file(path_);
  } catch (const std::exception&) {
    // The name contains the process, so a later clean-up deletes the file.
  }
}

namespace {

std::shared_ptr<WorkspaceRouteState> workspace_state_of(Group& group) {
  return group::inside(group).extension<WorkspaceRouteState>();
}

/// Returns the path that a call uses: the given path, or the workspace of a file group. Empty: no workspace.
std::string workspace_path_of(const GatherCall& call) {
  if (!call.options->workspace.path.empty()) return call.options->workspace.path;
  return workspace::workspace_of(*call.group);
}

}  // namespace

const workspace::WorkspaceDirectory& workspace_of(const GatherCall& call, WorkspaceRouteState& state) {
  const std::string path = workspace_path_of(call);
  const auto found = state.directories.find(path);
  if (found != state.directories.end()) return found->second;
  workspace::WorkspaceDirectory directory = workspace::prepare_workspace(path);
  if (call.is_first()) workspace::sweep_dead(directory.path);
  return state.directories.emplace(path, std::move(directory)).first->second;
}

namespace {

/// Step 1: checks whether all ranks of a list see the same directory.
class WorkspacePreflight final : public Preflight {
 public:
  WorkspacePreflight(const GatherCall& call, ExchangeRecord& record)
      : call_(call), state_(workspace_state_of(*call.group)) {
    path_ = workspace_path_of(call);
    const workspace::WorkspaceDirectory& directory = workspace_of(call, *state_);
    const bool is_known = std::ranges::all_of(call.list, [&](int rank) {
      return rank == call.group->rank() || (!call.is_first() && rank != call.first()) ||
             state_->confirmed.contains({path_, rank});
    });
    if (is_known) return;
    record.needs_preflight = true;
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

  void check(const Records& records) override {
    if (!call_.is_sender()) return;
    const ExchangeRecord& first = records[static_cast<std::size_t>(call_.first())];
    if (!first.needs_preflight) {
      if (!records[static_cast<std::size_t>(call_.group->rank())].needs_preflight) return;
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("workspace.path differs between ranks: rank {} uses {}, rank {} uses the path of the "
                              "previous call. Change workspace.path on all ranks in the same call",
                              call_.group->info(call_.group->rank()).global_rank, in_quotes(path_),
                              call_.group->info(call_.first()).global_rank));
    }
    find(fmt::format("{:016x}", first.segment));
  }

  void commit() noexcept override {
    token_ = PassingFile();
    try {
      for (const int rank : call_.list)
        if (call_.is_first() || rank == call_.first()) state_->confirmed.emplace(path_, rank);
    } catch (const std::bad_alloc&) {
      // The check is repeated next time.
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
        std::min(group::timeout_of(call_.options->timeout, call_.group->timeout()), workspace::longest_lateness);
    const std::string place = directory.path + "/token";
    try {
      workspace::patiently(place,
                           {.deadline = os::Clock::now() + longest,
                            .check =
                                [&] {
                                  call_.group->progress();
                                  check_group();
                                }},
                           [&] {
                             // Found by listing, because the full name contains the root's process.
                             if (std::ranges::none_of(os::list_directory(directory.path), is_token))
                               throw Error(ErrorKind::not_found, "no token");
                           });
    } catch (const Error& error) {
      check_group();
      if (error.kind() != ErrorKind::not_found) throw;
      // The token is deleted when its rank dies. The next round reports the dead rank.
      if (call_.group->liveness(call_.first())->is_dead()) return;
      const RankInfo& own = call_.group->info(call_.group->rank());
      const RankInfo& first = call_.group->info(call_.first());
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("rank {} (host {}) does not see in the workspace {} the file that rank {} (host {}) has "
                              "written: the hosts use different directories. Mount the same directory on all hosts",
                              own.global_rank, own.host, in_quotes(path_), first.global_rank, first.host),
                  {.path = directory.path});
    }
  }

  /// Throws the group's failure. The root deletes its token when the group fails, so a missing token is then no
  /// evidence.
  void check_group() const {
    if (const auto failure = call_.group->error()) throw *failure;
  }

  const GatherCall& call_;
  std::shared_ptr<WorkspaceRouteState> state_;
  std::string path_;
  PassingFile token_;
};

/// Configs and tensors through a workspace.
class WorkspaceTransfer final : public Transfer {
 public:
  explicit WorkspaceTransfer(const GatherCall& call) : call_(call), state_(workspace_state_of(*call.group)) {
    if (call.value != nullptr && call.is_member()) own_.emplace(call, *state_);
  }

  void offer(ExchangeRecord& record) override {
    if (own_) own_->offer(record);
  }
  void move(const Records& records, ExchangeReport&) override {
    const bool writes = own_ && (call_.is_sender() || call_.options->workspace.keep_files);
    if (writes && call_.is_sender()) own_->send();
    if (!call_.is_first()) return;
    entries_ = receive_files(call_, *state_, records);
    if (writes) own_->send();
  }
  void commit() noexcept override {
    if (own_) own_->commit();
  }
  std::vector<std::optional<Config>> deliver() override {
    if (entries_.empty()) entries_.resize(call_.list.size());
    return std::move(entries_);
  }
  std::vector<std::unique_ptr<OutstandingLease>> obligations() override {
    std::vector<std::unique_ptr<OutstandingLease>> all;
    if (own_ && call_.is_part && call_.is_sender()) all.push_back(own_->obligation());
    return all;
  }

 private:
  const GatherCall& call_;
  std::shared_ptr<WorkspaceRouteState> state_;
  std::optional<SentFile> own_;
  std::vector<std::optional<Config>> entries_;
};

/// Merges through a workspace: the root reads the files of all members and merges them in its memory. The bytes of the
/// other ranks exist once as files, so writing them directly into the result, as over shared memory, would gain
/// nothing.
class WorkspaceMerge final : public Transfer {
 public:
  explicit WorkspaceMerge(const GatherCall& call)
      : call_(call), state_(workspace_state_of(*call.group)), own_(call, *state_) {}

  void offer(ExchangeRecord& record) override {
    own_.offer(record);
    offer_merge(*call_.merge, call_.value->as_tensor().view(), record);
    record.moving_bytes = record.payload_bytes;
    record.closes = true;
  }
  void move(const Records& records, ExchangeReport&) override {
    if (call_.is_sender()) own_.send();
    if (!call_.is_first()) return;
    const std::vector<std::optional<Config>> others = receive_files(call_, *state_, records);
    if (call_.options->workspace.keep_files) own_.send();
    std::vector<TensorView> sources{call_.value->as_tensor().view()};
    for (std::size_t position = 1; position < others.size(); ++position) {
      // A sender that failed reports the reason in its own status.
      if (!others[position]) return;
      sources.push_back(others[position]->as_tensor().view());
    }
    result_ = merge::merge_in_memory(*call_.merge, sources, call_.list, [&] { call_.group->progress(); });
  }
  void commit() noexcept override { own_.commit(); }
  std::vector<std::optional<Config>> deliver() override { return {Config(std::move(result_))}; }

 private:
  const GatherCall& call_;
  std::shared_ptr<WorkspaceRouteState> state_;
  SentFile own_;
  Tensor result_;
};

class WorkspaceRoute final : public RouteDriver {
 public:
  [[nodiscard]] Route route() const noexcept override { return Route::workspace; }
  [[nodiscard]] bool is_usable(const GatherCall& call) const override { return !workspace_path_of(call).empty(); }
  [[nodiscard]] std::string obstacle(const GatherCall&) const override {
    return "workspace.path is not set (a directory that all ranks see)";
  }
  [[nodiscard]] std::string reason(const GatherCall& call) const override {
    return fmt::format("the ranks share only the workspace {}", in_quotes(workspace_path_of(call)));
  }
  [[nodiscard]] bool moves(const TensorView&) const override { return true; }
  std::unique_ptr<Preflight> preflight(const GatherCall& call, ExchangeRecord& record) const override {
    if (!moves_elements(call)) return nullptr;
    return std::make_unique<WorkspacePreflight>(call, record);
  }
  std::unique_ptr<Transfer> begin(const GatherCall& call) const override {
    if (call.operation == GatherKind::merge) return std::make_unique<WorkspaceMerge>(call);
    return std::make_unique<WorkspaceTransfer>(call);
  }
  std::uint64_t settle(Group& group, Keep) const override {
    // Files of earlier streams: the root will not read the remaining ones.
    workspace_state_of(group)->under_way.clear();
    return 0;
  }
};

}  // namespace

std::unique_ptr<RouteDriver> make_workspace_route() {
  return std::make_unique<WorkspaceRoute>();
}

namespace {

/// Precedes the name of the file in a message.
struct FileMessageHeader {
  std::uint64_t exchange = 0;
  std::uint32_t is_written = 0;
  std::uint32_t reserved = 0;
};
constexpr std::uint64_t longest_name = 255;

/// A part of a stream that the root has to delete.
class FileObligation final : public OutstandingLease {
 public:
  FileObligation(std::string path, bool is_network)
      : path_(std::move(path)), is_network_(is_network), pauses_(is_network) {}
  [[nodiscard]] bool is_given_back() const noexcept override {
    const std::size_t slash = path_.find_last_of('/');
    const std::string name = path_.substr(slash + 1);
    try {
      // The directory is listed instead of probing the name: a client's cached information about a name may be stale.
      const auto entries = os::list_directory(path_.substr(0, slash));
      return std::ranges::find(entries, name, &os::DirectoryEntry::name) == entries.end();
    } catch (const std::exception&) {
      return false;
    }
  }
  bool wait(os::Clock::time_point deadline) const override {
    while (!is_given_back()) {
      if (os::Clock::now() >= deadline) return false;
      pauses_.sleep();
      if (!is_network_ || !pauses_.is_patient()) continue;
      try {
        workspace::refresh(path_.substr(0, path_.find_last_of('/')));
      } catch (const Error&) {
        // The next listing reports the problem.
      }
    }
    return true;
  }

 private:
  std::string path_;
  bool is_network_;
  mutable workspace::Pauses pauses_;  // the pauses grow from one wait to the next
};

}  // namespace

void SentFile::offer(ExchangeRecord& record) {
  value_ = split(*call_.value);
  std::uint64_t bytes = 0;
  for (const auto& [name, tensor] : value_.weights) bytes += tensor.nbytes();
  record.payload_bytes = bytes;
  if (call_.is_first() && !call_.options->workspace.keep_files) return;
  // A config without tensors is also written as a file.
  record.closes = true;
  if (call_.is_sender()) record.moving_bytes = bytes;
}

void SentFile::send() {
  const bool is_kept = call_.options->workspace.keep_files;
  // The root waits for this message, so sending it allocates no memory. It also reports any earlier failure.
  std::array<std::byte, sizeof(FileMessageHeader) + longest_name> message;
  FileMessageHeader header{.exchange = call_.number};
  std::size_t length = sizeof header;
  const auto tell = [&] {
    std::memcpy(message.data(), &header, sizeof header);
    if (call_.is_sender())
      call_.group->send(call_.first(), std::span(message).first(length), call_.wait("gather: writing"),
                        group::Subject::exchange);
  };
  try {
    workspace::Name name{.kind = is_kept ? workspace::NameKind::kept : workspace::NameKind::exchange,
                         .job = workspace::job_text(call_.group->nonce()),
                         .rank = call_.group->rank(),
                         .world_size = call_.group->size(),
                         .step = call_.is_part ? ++state_.parts : call_.number};
    if (!is_kept) name.writer = os::own_identity();
    const std::string file = workspace::file_name(name);
    if (call_.stage) {
      call_.stage();
      value_ = split(*call_.value);
    }
    write(workspace_of(call_, state_).path + "/" + file);
    header.is_written = 1;
    length += file.copy(reinterpret_cast<char*>(message.data()) + length, longest_name);
  } catch (const std::exception&) {
    tell();
    throw;
  }
  tell();
}

void SentFile::write(const std::string& path) {
  StateFileOptions options;
  const std::string& name = path.substr(path.find_last_of('/') + 1);
  const auto parsed = workspace::parse_name(name);
  options.info = {
      .job = call_.group->nonce(), .step = parsed->step, .rank = parsed->rank, .world_size = parsed->world_size};
  options.zstd_level = call_.options->workspace.zstd_level;
  options.durable = call_.options->workspace.keep_files;
  options.temporary = workspace::growing_name();
  std::vector<StateFileWriter::Entry> entries;
  std::vector<TensorView> views;
  for (const auto& [weight, tensor] : value_.weights) {
    entries.push_back({weight, tensor.dtype(), tensor.shape()});
    views.push_back(tensor.view());
  }
  StateFileWriter writer(path, value_.config, std::move(entries), options);
  writer.write_all(views, [&](const Progress&) { call_.group->progress(); });
  file_ = PassingFile(path);
  writer.commit();
}

void SentFile::commit() noexcept {
  if (call_.options->workspace.keep_files)
    file_.keep();
  else if (!call_.is_part)
    file_ = PassingFile();
}

std::unique_ptr<OutstandingLease> SentFile::obligation() {
  const workspace::WorkspaceDirectory& directory = workspace_of(call_, state_);
  auto obligation = std::make_unique<FileObligation>(file_.path(), directory.is_network);
  state_.under_way.push_back(std::move(file_));
  // Earlier files have been deleted by the root: this rank has waited for that.
  while (state_.under_way.size() > static_cast<std::size_t>(call_.options->pipeline_depth)) {
    state_.under_way.front().keep();
    state_.under_way.pop_front();
  }
  return obligation;
}

namespace {

std::string take_name(const GatherCall& call, int sender) {
  FileMessageHeader header;
  const std::vector<std::byte> message = receive_of(call, sender, sizeof header + longest_name, "gather: reading");
  if (message.size() < sizeof header) throw Error(ErrorKind::corrupt, "malformed message of a rank: too short");
  std::memcpy(&header, message.data(), sizeof header);
  if (header.is_written == 0) return {};
  return {reinterpret_cast<const char*>(message.data()) + sizeof header, message.size() - sizeof header};
}

Config read_file(const GatherCall& call, WorkspaceRouteState& state, int sender, const std::string& name) {
  const auto parsed = workspace::parse_name(name);
  const std::string job = workspace::job_text(call.group->nonce());
  if (!parsed || parsed->job != job || parsed->rank != sender ||
      (parsed->kind != workspace::NameKind::exchange && parsed->kind != workspace::NameKind::kept))
    throw Error(ErrorKind::corrupt, fmt::format("malformed message: rank {} names {} as its state file",
                                                call.group->info(sender).global_rank, in_quotes(name)));
  const std::string path = workspace_of(call, state).path + "/" + name;
  Config value;
  const workspace::Patience patience{
      .deadline = os::Clock::now() + group::timeout_of(call.options->timeout, call.group->timeout()), .check = [&] {
        if (const auto failure = call.group->error()) throw *failure;
        call.group->progress();
      }};
  workspace::patiently(path, patience, [&] {
    const StateFile file = StateFile::open(path);
    const StateFileInfo& info = file.info();
    if (info.job != call.group->nonce() || info.rank != sender || info.step != parsed->step)
      throw Error(ErrorKind::corrupt,
                  fmt::format("{}: its content contradicts its name: rank {}, step {} of job {}", in_quotes(path),
                              info.rank, info.step, workspace::job_text(info.job)),
                  {.path = path});
    State whole{file.config(), {}};
    whole.weights.reserve(file.tensors().size());
    for (std::size_t i = 0; i < file.tensors().size(); ++i) {
      whole.weights.emplace_back(file.tensors()[i].name, file.tensor(i));
      call.group->progress();
    }
    value = join(whole);
  });
  if (call.is_part) os::remove_file(path);
  return value;
}

}  // namespace

std::vector<std::optional<Config>> receive_files(const GatherCall& call, WorkspaceRouteState& state,
                                                 const Records& records) {
  std::vector<std::optional<Config>> values(call.list.size());
  std::optional<Error> trouble;
  for (std::size_t position = 1; position < values.size(); ++position) {
    const int sender = call.list[position];
    if (!records[static_cast<std::size_t>(sender)].has_value) continue;
    const std::string name = take_name(call, sender);
    // The sender's own status gives the reason.
    if (name.empty() || trouble) continue;
    try {
      values[position] = read_file(call, state, sender, name);
    } catch (const Error& error) {
      if (call.group->error()) throw;
      const RankInfo& other = call.group->info(sender);
      trouble =
          error.with_context(fmt::format("reading the state file of rank {} (host {})", other.global_rank, other.host));
    }
  }
  if (trouble) throw *trouble;
  return values;
}

}  // namespace muster::gather
