// SPDX-License-Identifier: Apache-2.0
#include "src/gather/workspace_state.hpp"
#include "src/os/clock.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "muster/state_file.hpp"
#include "src/base/escaped.hpp"
#include "src/os/directory.hpp"
#include "src/sync/waits.hpp"
#include "src/workspace/discovery.hpp"
#include "src/workspace/names.hpp"

namespace muster::gather {
namespace {

/// Precedes the name of the file in a message.
struct FileMessageHeader {
  std::uint64_t exchange = 0;
  std::uint32_t is_written = 0;
  std::uint32_t reserved = 0;
};
constexpr std::uint64_t longest_name = 255;

/// A part of a stream that the root has to delete.
class FileObligation final : public Obligation {
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

void SentFile::offer(Record& record) {
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
                        sync::Subject::exchange);
  };
  try {
    workspace::Name name{.kind = is_kept ? workspace::NameKind::kept : workspace::NameKind::exchange,
                         .job = workspace::job_text(call_.group->nonce()),
                         .rank = call_.group->rank(),
                         .world_size = call_.group->size(),
                         .generation = call_.is_part ? ++state_.parts : call_.number};
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
  options.info = {.job = call_.group->nonce(),
                  .generation = parsed->generation,
                  .rank = parsed->rank,
                  .world_size = parsed->world_size};
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

std::unique_ptr<Obligation> SentFile::obligation() {
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

std::string take_name(const Call& call, int sender) {
  FileMessageHeader header;
  const std::vector<std::byte> message = receive_of(call, sender, sizeof header + longest_name, "gather: reading");
  if (message.size() < sizeof header) throw Error(ErrorKind::corrupt, "a message of a rank is too short");
  std::memcpy(&header, message.data(), sizeof header);
  if (header.is_written == 0) return {};
  return {reinterpret_cast<const char*>(message.data()) + sizeof header, message.size() - sizeof header};
}

Config read_file(const Call& call, WorkspaceRouteState& state, int sender, const std::string& name) {
  const auto parsed = workspace::parse_name(name);
  const std::string job = workspace::job_text(call.group->nonce());
  if (!parsed || parsed->job != job || parsed->rank != sender ||
      (parsed->kind != workspace::NameKind::exchange && parsed->kind != workspace::NameKind::kept))
    throw Error(ErrorKind::corrupt, fmt::format("rank {} names {} as its state file", sender, in_quotes(name)));
  const std::string path = workspace_of(call, state).path + "/" + name;
  Config value;
  const workspace::Patience patience{
      .deadline = os::Clock::now() + sync::timeout_of(call.options->timeout, call.group->timeout()), .check = [&] {
        if (const auto failure = call.group->failure()) throw *failure;
        call.group->progress();
      }};
  workspace::patiently(path, patience, [&] {
    const StateFile file = StateFile::open(path);
    const StateFileInfo& info = file.info();
    if (info.job != call.group->nonce() || info.rank != sender || info.generation != parsed->generation)
      throw Error(ErrorKind::corrupt,
                  fmt::format("{} is not what its name says: rank {}, generation {} of job {}", in_quotes(path),
                              info.rank, info.generation, workspace::job_text(info.job)),
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

std::vector<std::optional<Config>> receive_files(const Call& call, WorkspaceRouteState& state,
                                                 std::span<const Record> records) {
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
      if (call.group->failure()) throw;
      trouble = error.with_context(
          fmt::format("reading what rank {} (host {}) wrote", sender, call.group->info(sender).host));
    }
  }
  if (trouble) throw *trouble;
  return values;
}

}  // namespace muster::gather
