// SPDX-License-Identifier: Apache-2.0
// The rendezvous of a file group: processes that know a directory, a key and their rank become a job. Its steps are
// those of src/rendezvous/session.hpp; here a line consists of files in meeting-KEY/ (names.hpp):
//
//  1. Each rank makes a random token. Its hello is a file with the token in its name.
//  2. Rank 0 lists the directory and writes a call: one file with all tokens that it has found. It writes another call
//     whenever it finds more. Hellos of processes that are proved dead are removed.
//  3. A rank that finds its own token in a call answers with a "here" file, which completes a line. Files of an earlier
//     job do not answer, and its calls do not have this rank's token. So neither is taken for a live rank.
//  4. Each further message is a numbered file: one per rank to rank 0, and one for all ranks from it.
//  5. Rank 0 contributes the job's nonce and directory. Each rank then writes its process identity into that directory.
//     All ranks enter a first barrier of the group, and then remove their rendezvous files.
// A line ends if the process at its other end is proved dead. The loss of a process on another host is detected at the
// deadline.

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "muster/workspace.hpp"
#include "src/base/escaped.hpp"
#include "src/base/fixed_string.hpp"
#include "src/os/directory.hpp"
#include "src/os/file.hpp"
#include "src/os/process.hpp"
#include "src/os/publish.hpp"
#include "src/rendezvous/session.hpp"
#include "src/workspace/discovery.hpp"
#include "src/workspace/group_directory.hpp"
#include "src/workspace/names.hpp"

namespace muster::workspace {
namespace {

using rendezvous::milliseconds;
using Kind = MeetingName::Kind;

constexpr int protocol_version = 3;
constexpr std::uint64_t longest_text = 64 << 20;
constexpr milliseconds between_proofs{100};

std::string where(const MeetingName& name) {
  return fmt::format("host {}, pid {}", name.writer.host, name.writer.pid);
}

/// Makes a directory that another process may be removing at this moment, and a first file in it. Other users may know
/// the name before it exists: if they have put a symbolic link there, nothing is written through it.
void enter(const std::string& directory, const std::string& file, std::span<const std::byte> bytes) {
  const std::string path = directory + "/" + file;
  for (int turn = 0;; ++turn) {
    try {
      if (!os::make_directory(directory))
        if (const auto there = os::file_status(directory, os::Links::themselves); there && !there->is_directory)
          throw Error(ErrorKind::invalid_argument,
                      fmt::format("{}: creating the directory of file_group: it is {}. Remove it if it is not needed, "
                                  "or use a workspace that other users cannot write to",
                                  in_quotes(directory), there->is_link ? "a link" : "a file"),
                      {.path = directory});
      if (bytes.empty())
        os::write_new_file(path, {});
      else
        os::publish(path, bytes, growing_name());
      return;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::not_found || turn == 10) throw;
    }
  }
}

class FileLine;

/// This process's rendezvous files, removed with this object, and the last listing.
class Meeting final : public rendezvous::Connector {
 public:
  Meeting(WorkspaceDirectory workspace, const FileGroupOptions& options, rendezvous::Clock::time_point deadline)
      : workspace_(std::move(workspace)),
        token_of_key_(rendezvous::token_of(options.key)),
        deadline_(deadline),
        path_(workspace_.path + "/" +
              file_name({.kind = NameKind::meeting,
                         .random = fmt::format("{:016x}", XXH3_64bits(options.key.data(), options.key.size()))})),
        token_(os::random_hex(8)) {}
  ~Meeting() override;

  rendezvous::Token open() override;
  std::vector<std::unique_ptr<rendezvous::Line>> arrivals() override;
  /// Keeps the messages for ranks that have not read them yet. They become garbage when this process ends.
  void give_up() noexcept override { own_files_.clear(); }
  void tell_all(std::span<rendezvous::Line* const>, const rendezvous::OutgoingPointer& message) override;
  [[nodiscard]] std::string trace_of(int rank) const override;
  std::unique_ptr<rendezvous::Line> reach(rendezvous::Hello hello, rendezvous::Clock::time_point until,
                                          std::string& reason) override;
  [[nodiscard]] milliseconds pause(int tries) const override {
    return milliseconds(std::min(1 << std::min(tries, 8), workspace_.is_network ? 250 : 10));
  }
  void wait(std::span<rendezvous::Line* const> lines, milliseconds longest) override;

 private:
  friend class FileLine;
  void look();
  void call(const std::map<std::string, MeetingName>& hellos);
  void write(const MeetingName& name, std::span<const std::byte> bytes);
  [[nodiscard]] std::vector<std::byte> read(const std::string& file) const;
  [[nodiscard]] std::string name_of(MeetingName name) const {
    name.writer = os::own_identity();
    return meeting_file_name(name);
  }
  /// Returns a call with this rank's token that this rank has not read before. `except` is a rank 0 that has already
  /// called it.
  std::optional<MeetingName> next_call(const std::string& except);

  const WorkspaceDirectory workspace_;
  const rendezvous::Token token_of_key_;
  const rendezvous::Clock::time_point deadline_;
  const std::string path_;
  const std::string token_;
  Pauses pauses_{workspace_.is_network};
  std::vector<std::string> own_files_;
  std::vector<std::pair<std::string, MeetingName>> seen_;
  // Used by rank 0.
  std::set<std::string> called_;
  std::set<std::string> answered_;
  std::uint64_t calls_ = 1;
  std::uint64_t told_ = 0;
  // Used by the other ranks.
  std::set<std::string> read_;
  int rank_ = 0;
};

/// `mine` and `theirs` are the names of messages in each direction, without their numbers.
class FileLine final : public rendezvous::Line {
 public:
  FileLine(Meeting& meeting, MeetingName mine, MeetingName theirs, rendezvous::Message first)
      : meeting_(meeting), mine_(std::move(mine)), theirs_(std::move(theirs)), first_(std::move(first)) {}

  void send(const rendezvous::OutgoingPointer& message) override {
    // Rank 0 sends to all ranks with tell_all(), and its call serves as Word::heard.
    if (mine_.kind == Kind::said) return;
    meeting_.write(mine_, message->bytes);
    ++mine_.number;
    rendezvous::MessageHead head;
    std::memcpy(&head, message->bytes.data(), sizeof head);
    if (head.word == rendezvous::Word::failure) meeting_.give_up();
  }
  void move() override {}
  [[nodiscard]] bool is_drained() const override { return true; }
  std::optional<rendezvous::Message> next(const rendezvous::MessageLimits& limits) override;
  [[nodiscard]] std::optional<End> end() const override { return end_; }
  [[nodiscard]] std::string from() const override { return where(theirs_); }

 private:
  void check_clash();

  Meeting& meeting_;
  MeetingName mine_;
  MeetingName theirs_;
  std::optional<rendezvous::Message> first_;  // precedes the messages in files
  std::optional<End> end_;
  bool is_dead_ = false;  // was proved dead before the last listing
  rendezvous::Clock::time_point proved_;
};

std::optional<rendezvous::Message> FileLine::next(const rendezvous::MessageLimits& limits) {
  if (end_) return std::nullopt;
  if (first_) return std::exchange(first_, std::nullopt);
  if (theirs_.kind == Kind::said) check_clash();
  const std::string file = meeting_file_name(theirs_);
  const auto found = std::ranges::find(
      meeting_.seen_, file, [](const auto& item) -> auto& { return item.first; });
  if (found == meeting_.seen_.end()) {
    if (is_dead_) end_ = End{.words = "its process has ended"};
    // The process may have written its last file after the listing.
    if (!is_dead_ && rendezvous::Clock::now() - proved_ > between_proofs) {
      is_dead_ = os::life_of(theirs_.writer) == os::Life::dead;
      if (is_dead_) meeting_.look();
      proved_ = rendezvous::Clock::now();
      if (is_dead_) return next(limits);
    }
    return std::nullopt;
  }
  const std::vector<std::byte> bytes = meeting_.read(file);
  ++theirs_.number;
  rendezvous::MessageHead head;
  if (bytes.size() >= sizeof head) std::memcpy(&head, bytes.data(), sizeof head);
  const auto parsed = bytes.size() >= sizeof head ? parse_head(head, limits) : std::nullopt;
  if (!parsed || parsed->bytes != bytes.size() - sizeof head || parsed->descriptors != 0) {
    end_ = End{.is_garbage = true, .words = file};
    return std::nullopt;
  }
  return rendezvous::Message{.word = parsed->word, .body = {bytes.begin() + sizeof head, bytes.end()}};
}

void FileLine::check_clash() {
  const auto other = meeting_.next_call(theirs_.first_token);
  if (!other) return;
  const Error clash(
      ErrorKind::rank_mismatch,
      fmt::format(
          "file_group: two processes are rank 0: {}; and {}. Give each process its own rank, and each job its own key",
          where(theirs_), where(*other)),
      {.rank = 0, .pid = other->writer.pid, .host = other->writer.host});
  // The second rank 0 must fail, too; the first one receives the failure as usual.
  meeting_.write(
      {.kind = Kind::here, .rank = meeting_.rank_, .token = meeting_.token_, .first_token = other->first_token}, {});
  meeting_.write({.kind = Kind::told, .token = meeting_.token_, .first_token = other->first_token},
                 rendezvous::failure_message(clash)->bytes);
  throw clash;
}

Meeting::~Meeting() {
  try {
    for (const std::string& file : own_files_) os::remove_file(path_ + "/" + file);
    os::remove_empty_directory(path_);
  } catch (const std::exception&) {
    // The next clean-up identifies them by the process in their names.
  }
}

void Meeting::look() {
  std::vector<os::DirectoryEntry> entries;
  try {
    entries = fresh_listing(path_, workspace_.is_network);
  } catch (const Error& error) {
    // A network file system has dropped its handle of the directory. The last listing remains valid until the next one.
    if (error.os_error() == ESTALE && rendezvous::Clock::now() < deadline_) return;
    throw;
  }
  seen_.clear();
  for (const os::DirectoryEntry& entry : entries)
    if (auto name = parse_meeting_name(entry.name)) seen_.emplace_back(entry.name, std::move(*name));
}

void Meeting::wait(std::span<rendezvous::Line* const> lines, milliseconds longest) {
  if (longest <= milliseconds(0)) return look();
  // A rank that has not been called lists the directory when it tries again.
  if (lines.empty() && rank_ != 0) return std::this_thread::sleep_for(longest);
  pauses_.sleep();
  look();
}

std::vector<std::byte> Meeting::read(const std::string& file) const {
  std::vector<std::byte> bytes;
  patiently(path_ + "/" + file, {.deadline = deadline_},
            [&] { bytes = os::read_small_file(path_ + "/" + file, longest_text); });
  return bytes;
}

void Meeting::write(const MeetingName& name, std::span<const std::byte> bytes) {
  const std::string file = name_of(name);
  own_files_.push_back(file);
  if (bytes.empty())
    os::write_new_file(path_ + "/" + file, {});
  else
    os::publish(path_ + "/" + file, bytes, growing_name());
  pauses_ = Pauses(workspace_.is_network);
}

rendezvous::Token Meeting::open() {
  own_files_.push_back(name_of({.kind = Kind::call, .first_token = token_}));
  enter(path_, own_files_.back(), {});
  look();
  return token_of_key_;
}

/// Writes a new call if there are new hellos.
void Meeting::call(const std::map<std::string, MeetingName>& hellos) {
  bool is_new = false;
  for (const auto& [token, name] : hellos) is_new = called_.insert(token).second || is_new;
  if (!is_new) return;
  std::string tokens;
  for (const std::string& token : called_) tokens += token + "\n";
  write({.kind = Kind::call, .number = calls_++, .first_token = token_}, std::as_bytes(std::span(tokens)));
}

std::vector<std::unique_ptr<rendezvous::Line>> Meeting::arrivals() {
  std::map<std::string, MeetingName> hellos;
  std::set<std::string> here;
  std::vector<std::unique_ptr<rendezvous::Line>> lines;
  for (const auto& [file, name] : seen_)
    if (name.kind == Kind::here && name.first_token == token_) here.insert(name.token);
  for (const auto& [file, name] : seen_) {
    if (name.kind != Kind::hello || answered_.contains(name.token)) continue;
    if (!here.contains(name.token) && os::life_of(name.writer) == os::Life::dead)
      os::remove_file(path_ + "/" + file);
    else
      hellos.emplace(name.token, name);
  }
  call(hellos);
  for (const auto& [file, answer] : seen_) {
    const auto hello = hellos.find(answer.token);
    if (answer.kind != Kind::here || answer.first_token != token_ || hello == hellos.end()) continue;
    answered_.insert(answer.token);
    rendezvous::Message first{.word = rendezvous::Word::hello};
    if (hello->second.version == protocol_version) {
      first.body = read(meeting_file_name(hello->second));
    } else {
      rendezvous::Hello other{.token = token_of_key_,
                              .rank = hello->second.rank,
                              .size = hello->second.size,
                              .pid = hello->second.writer.pid};
      put_text(other.version, fmt::format("of protocol {}", hello->second.version));
      put_text(other.host, hello->second.writer.host);
      const auto bytes = std::as_bytes(std::span(&other, 1));
      first.body.assign(bytes.begin(), bytes.end());
    }
    first.body.resize(sizeof(rendezvous::Hello));
    lines.push_back(std::make_unique<FileLine>(
        *this, MeetingName{.kind = Kind::said},
        MeetingName{.kind = Kind::told, .token = answer.token, .first_token = token_, .writer = answer.writer},
        std::move(first)));
  }
  return lines;
}

void Meeting::tell_all(std::span<rendezvous::Line* const>, const rendezvous::OutgoingPointer& message) {
  const bool keeps = own_files_.empty();
  write({.kind = Kind::said, .number = told_++, .first_token = token_}, message->bytes);
  if (keeps) give_up();
}

std::string Meeting::trace_of(int rank) const {
  std::string text;
  for (const auto& [file, name] : seen_)
    if (name.kind == Kind::hello && name.rank == rank)
      text += fmt::format(" (a hello of {} does not answer)", where(name));
  return text;
}

std::optional<MeetingName> Meeting::next_call(const std::string& except) {
  for (const auto& [file, name] : seen_) {
    if (name.kind != Kind::call || name.first_token == except || os::life_of(name.writer) == os::Life::dead ||
        !read_.insert(file).second)
      continue;
    try {
      const std::vector<std::byte> bytes = read(file);
      const std::string_view tokens(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      if (tokens.find(token_ + "\n") != std::string_view::npos) return name;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::not_found) throw;  // not_found: the rank 0 of that call has given up
    }
  }
  return std::nullopt;
}

std::unique_ptr<rendezvous::Line> Meeting::reach(rendezvous::Hello hello, rendezvous::Clock::time_point,
                                                 std::string& reason) {
  if (own_files_.empty()) {
    hello.token = token_of_key_;
    rank_ = hello.rank;
    own_files_.push_back(name_of(
        {.kind = Kind::hello, .version = protocol_version, .rank = hello.rank, .size = hello.size, .token = token_}));
    enter(path_, own_files_.back(), std::as_bytes(std::span(&hello, 1)));
  }
  look();
  const auto caller = next_call({});
  if (!caller) {
    reason = "it has not answered in " + in_quotes(path_);
    return nullptr;
  }
  write({.kind = Kind::here, .rank = rank_, .token = token_, .first_token = caller->first_token}, {});
  rendezvous::Hello root{.token = token_of_key_, .rank = 0, .size = hello.size, .pid = caller->writer.pid};
  put_text(root.host, caller->writer.host);
  const auto bytes = std::as_bytes(std::span(&root, 1));
  return std::make_unique<FileLine>(
      *this, MeetingName{.kind = Kind::told, .token = token_, .first_token = caller->first_token},
      MeetingName{.kind = Kind::said, .first_token = caller->first_token, .writer = caller->writer},
      rendezvous::Message{.word = rendezvous::Word::heard, .body = {bytes.begin(), bytes.end()}});
}

}  // namespace

FileGroupFacts meet(const WorkspaceDirectory& workspace, const FileGroupOptions& options, milliseconds timeout) {
  const rendezvous::Clock::time_point deadline = rendezvous::Clock::now() + timeout;
  const auto session = std::make_shared<rendezvous::Session>(
      rendezvous::Terms{
          .call = "file_group",
          .place = "in " + in_quotes(workspace.path),
          .hint = "Check that all ranks run, with the same directory and key, or raise MUSTER_TIMEOUT (seconds)",
          .rank = options.rank,
          .size = options.size,
          .deadline = deadline},
      std::make_unique<Meeting>(workspace, options, deadline));
  FileGroupFacts job;
  job.meeting = session;
  const auto directory_of = [&](const Group::Nonce& nonce) {
    return workspace.path + "/" + file_name({.kind = NameKind::job, .job = job_text(nonce)});
  };
  try {
    // Each rank contributes its identity; on rank 0 the nonce precedes it.
    const std::vector<rendezvous::Member> members = session->round(
        [&] {
          rendezvous::RoundPart part;
          const std::string identity = identity_text(os::own_identity());
          if (options.rank == 0) {
            os::random_bytes(job.nonce);
            job.directory = directory_of(job.nonce);
            // The first file has the owner's name in it, so that a clean-up can identify the owner.
            enter(job.directory, member_name(0, os::own_identity()), {});
            part.payload.assign(job.nonce.begin(), job.nonce.end());
          }
          const auto bytes = std::as_bytes(std::span(identity));
          part.payload.insert(part.payload.end(), bytes.begin(), bytes.end());
          return part;
        },
        deadline);
    session->round(
        [&] {
          for (const rendezvous::Member& member : members) {
            std::span<const std::byte> left = member.payload;
            if (member.rank == 0 && left.size() >= sizeof job.nonce) {
              std::memcpy(job.nonce.data(), left.data(), sizeof job.nonce);
              left = left.subspan(sizeof job.nonce);
            }
            const auto identity = os::parse_identity({reinterpret_cast<const char*>(left.data()), left.size()});
            if (!identity)
              throw Error(ErrorKind::corrupt, fmt::format("file_group: malformed part of rank {}", member.rank));
            job.members.push_back({RankInfo{member.rank, identity->host, identity->pid}, *identity});
          }
          job.directory = directory_of(job.nonce);
          if (options.rank == 0) return rendezvous::RoundPart{};
          const std::string own = job.directory + "/" + member_name(options.rank, os::own_identity());
          patiently(own, {.deadline = deadline}, [&] { os::write_new_file(own, {}); });
          return rendezvous::RoundPart{};
        },
        deadline);
  } catch (const Error&) {
    if (options.rank == 0 && !job.directory.empty()) remove_group_directory(job.directory);
    throw;
  }
  return job;
}

}  // namespace muster::workspace
