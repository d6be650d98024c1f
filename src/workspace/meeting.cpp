// SPDX-License-Identifier: Apache-2.0
// The meeting: how processes that know nothing but a directory, a key and their rank become a job.
//
//  1. Each rank makes a random token and says hello in meeting-KEY/: rank, size and token are in the file's name.
//  2. Rank 0 lists, and calls: one file with all tokens that it sees, another one whenever it sees more. Hellos of
//     processes that are proved dead are left out, and removed.
//  3. A rank that finds its own token in a call answers "here". What an earlier job left behind does not answer, and
//     its calls do not have this rank's token: neither can be taken for a live rank.
//  4. Once each rank has answered, rank 0 makes the job's nonce and directory and writes who the ranks are. If two
//     answer for one rank, sizes or versions differ, or a rank was called by two, it writes that instead, for
//     everybody.
//  5. Each rank reads that, says in the job's directory which process it is, removes its hello and its answer, and all
//     meet in a first barrier; then rank 0 removes its calls and the list.
// A rank that dies before it has answered is missed at the deadline; one that dies later is missed in the first
// barrier.

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "muster/state.hpp"
#include "muster/workspace.hpp"
#include "src/os/directory.hpp"
#include "src/os/file.hpp"
#include "src/os/process.hpp"
#include "src/os/publish.hpp"
#include "src/sync/waits.hpp"
#include "src/workspace/discovery.hpp"
#include "src/workspace/group_directory.hpp"
#include "src/workspace/names.hpp"

namespace muster::workspace {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using Kind = MeetingName::Kind;

constexpr int protocol_version = 2;
constexpr std::uint64_t longest_text = 64 << 20;
constexpr milliseconds longest_refusal{1000};

std::string where(const MeetingName& name) {
  return fmt::format("host {}, pid {}", name.writer.host, name.writer.pid);
}

/// Makes a directory that another process may be removing at this moment, and a first file in it. Others may know its
/// name before it is there: where they have put a link, nothing is written behind that.
void enter(const std::string& directory, const std::string& file) {
  const std::string path = directory + "/" + file;
  for (int turn = 0;; ++turn) {
    try {
      if (!os::make_directory(directory))
        if (const auto there = os::file_status(directory, os::Links::themselves); there && !there->is_directory)
          throw Error(ErrorKind::argument,
                      fmt::format("meeting in {}: it is {}, not a directory: remove it if it is nobody's, or give a "
                                  "workspace that other users cannot write to",
                                  directory, there->is_link ? "a link" : "a file"),
                      {.path = directory});
      os::write_new_file(path, {});
      return;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::not_found || turn == 10) throw;
    }
  }
}

/// A rank's files in a meeting, removed with it.
class Meeting {
 public:
  /// `workspace` is prepared. Step 1.
  Meeting(const WorkspaceDirectory& workspace, const FileGroupOptions& options, milliseconds timeout);
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;
  ~Meeting();

  /// Steps 2 to 4, and "member" of step 5.
  Job attend() { return options_.rank == 0 ? lead() : follow(); }

 private:
  /// What a listing of the meeting shows. Of each kind, file names with what they say.
  struct Seen {
    std::vector<std::pair<std::string, MeetingName>> of(Kind kind) const {
      std::vector<std::pair<std::string, MeetingName>> some;
      std::ranges::copy_if(all, std::back_inserter(some), [&](const auto& item) { return item.second.kind == kind; });
      return some;
    }
    std::vector<std::pair<std::string, MeetingName>> all;
  };
  Job lead();
  Job follow();
  std::map<std::string, MeetingName> call_all(const Seen& seen);
  [[nodiscard]] bool has_answered(const Seen& seen, const std::map<std::string, MeetingName>& hellos) const;
  /// For all who meet here. `rank`: whom it is about.
  [[noreturn]] void refuse(ErrorKind kind, const std::string& words, std::optional<int> rank);
  void write(const std::string& name, const std::string& text);
  [[nodiscard]] Seen look() const;
  [[nodiscard]] std::string text_of(const std::string& file) const;
  [[nodiscard]] bool is_late(milliseconds grace = {}) const { return Clock::now() >= deadline_ + grace; }
  Job take(const std::string& file);

  WorkspaceDirectory workspace_;
  FileGroupOptions options_;
  milliseconds timeout_;
  Clock::time_point deadline_;
  std::string path_;
  std::string token_;
  std::vector<std::string> own_files_;
  // Rank 0's.
  std::set<std::string> called_;
  std::uint64_t calls_ = 0;
};

Meeting::Meeting(const WorkspaceDirectory& workspace, const FileGroupOptions& options,
                 std::chrono::milliseconds timeout)
    : workspace_(workspace), options_(options), timeout_(timeout), deadline_(Clock::now() + timeout) {
  const Name name{.kind = NameKind::meeting,
                  .random = fmt::format("{:016x}", XXH3_64bits(options.key.data(), options.key.size()))};
  path_ = workspace_.path + "/" + file_name(name);
  token_ = os::random_hex(8);
  own_files_.push_back(meeting_file_name({.kind = Kind::hello,
                                          .version = protocol_version,
                                          .rank = options.rank,
                                          .size = options.size,
                                          .token = token_,
                                          .writer = os::own_identity()}));
  enter(path_, own_files_.back());
}

Meeting::~Meeting() {
  try {
    for (const std::string& file : own_files_) os::remove_file(path_ + "/" + file);
    os::remove_empty_directory(path_);
  } catch (const std::exception&) {
    // Their names tell whose they are: a clean-up finds them.
  }
}

Meeting::Seen Meeting::look() const {
  Seen seen;
  for (const os::DirectoryEntry& entry : fresh_listing(path_, workspace_.is_network))
    if (auto name = parse_meeting_name(entry.name)) seen.all.emplace_back(entry.name, std::move(*name));
  return seen;
}

std::string Meeting::text_of(const std::string& file) const {
  const std::string path = path_ + "/" + file;
  std::string text;
  patiently(path, {.deadline = deadline_}, [&] {
    const auto bytes = os::read_small_file(path, longest_text);
    text.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  });
  return text;
}

void Meeting::write(const std::string& name, const std::string& text) {
  own_files_.push_back(name);
  if (text.empty())
    os::write_new_file(path_ + "/" + name, {});
  else
    os::publish(path_ + "/" + name, std::as_bytes(std::span(text)), growing_name());
}

/// The hellos of those who may live, by token. A new call, where there are new ones.
std::map<std::string, MeetingName> Meeting::call_all(const Seen& seen) {
  std::map<std::string, MeetingName> hellos;
  bool is_new = false;
  for (const auto& [file, name] : seen.of(Kind::hello)) {
    if (name.token == token_) continue;
    if (os::life_of(name.writer) == os::Life::dead) {
      os::remove_file(path_ + "/" + file);
      continue;
    }
    hellos.emplace(name.token, name);
    is_new = called_.insert(name.token).second || is_new;
  }
  if (!is_new) return hellos;
  std::string tokens;
  for (const std::string& token : called_) tokens += token + "\n";
  write(
      meeting_file_name({.kind = Kind::call, .number = calls_++, .first_token = token_, .writer = os::own_identity()}),
      tokens);
  return hellos;
}

/// Whether all ranks have come, and everyone who did has answered.
bool Meeting::has_answered(const Seen& seen, const std::map<std::string, MeetingName>& hellos) const {
  std::set<int> ranks;
  for (const auto& [token, hello] : hellos) ranks.insert(hello.rank);
  std::size_t answers = 0;
  for (const auto& [file, name] : seen.of(Kind::here))
    if (name.first_token == token_ && hellos.contains(name.token)) ++answers;
  return static_cast<int>(ranks.size()) >= options_.size - 1 && answers == hellos.size();
}

void Meeting::refuse(ErrorKind kind, const std::string& words, std::optional<int> rank) {
  const Error cause(kind, words, {.rank = rank});
  const MeetingName name{.kind = Kind::job, .first_token = token_, .writer = os::own_identity()};
  write(meeting_file_name(name),
        to_json(Config::object({{"kind", static_cast<int>(kind)}, {"error", std::string(cause.what())}})));
  // Those who are only coming shall hear it, too: they are still called. But who has interrupted the program waits for
  // its end.
  Pauses pauses(workspace_.is_network);
  const Clock::time_point end = Clock::now() + (kind == ErrorKind::cancelled ? milliseconds(50) : longest_refusal);
  for (;;) {
    const Seen seen = look();
    if (has_answered(seen, call_all(seen)) || Clock::now() >= end) break;
    pauses.sleep();
  }
  // Calls and refusal stay for those who have still to read them; this process's end makes them garbage.
  own_files_.resize(1);
  throw cause;
}

Job Meeting::lead() {
  Pauses pauses(workspace_.is_network);
  for (;;) {
    const Seen seen = look();
    const std::map<std::string, MeetingName> hellos = call_all(seen);
    std::map<int, MeetingName> present;
    for (const auto& [file, name] : seen.of(Kind::here)) {
      if (name.first_token != token_) continue;
      const auto hello = hellos.find(name.token);
      if (hello == hellos.end()) continue;  // it has died, or given up, since
      const MeetingName& rank = hello->second;
      if (rank.version != protocol_version)
        refuse(ErrorKind::version,
               fmt::format("rank {} ({}) runs another version of Muster: start all ranks with one", rank.rank,
                           where(rank)),
               rank.rank);
      if (rank.size != options_.size)
        refuse(ErrorKind::rank_mismatch,
               fmt::format("rank {} ({}) is one of {} ranks, and rank 0 one of {}: two jobs meet in {}; give each "
                           "its own key",
                           rank.rank, where(rank), rank.size, options_.size, workspace_.path),
               rank.rank);
      const auto [other, is_first] = present.emplace(rank.rank, rank);
      if (!is_first)
        refuse(ErrorKind::rank_mismatch,
               fmt::format("rank {} is there twice ({}; {}): two ranks were given one number, or two jobs meet in "
                           "{}; give each its own key",
                           rank.rank, where(other->second), where(rank), workspace_.path),
               rank.rank);
    }
    for (const auto& [file, name] : seen.of(Kind::clash))
      if (name.first_token == token_)
        refuse(ErrorKind::rank_mismatch,
               fmt::format("rank {} was called by two of rank 0: two jobs meet in {}; give each its own key", name.rank,
                           workspace_.path),
               0);
    if (static_cast<int>(present.size()) == options_.size - 1 && !present.contains(0)) {
      Job job;
      os::random_bytes(job.nonce);
      const std::string nonce = job_text(job.nonce);
      // With a name in it at once, so that what is left of it can be told to be nobody's.
      enter(workspace_.path + "/" + file_name({.kind = NameKind::job, .job = nonce}),
            member_name(0, os::own_identity()));
      Config members = Config::array({});
      members.push_back(Config::object({{"token", token_}, {"process", identity_text(os::own_identity())}}));
      for (const auto& [rank, name] : present)
        members.push_back(Config::object({{"token", name.token}, {"process", identity_text(name.writer)}}));
      const std::string file =
          meeting_file_name({.kind = Kind::job, .first_token = token_, .writer = os::own_identity()});
      write(file, to_json(Config::object({{"nonce", nonce}, {"members", std::move(members)}})));
      return take(file);
    }
    if (present.contains(0))
      refuse(ErrorKind::rank_mismatch,
             fmt::format("rank 0 is there twice (the other one: {}): two ranks were given one number, or two jobs "
                         "meet in {}; give each its own key",
                         where(present.at(0)), workspace_.path),
             0);
    if (is_late()) {
      std::string missing;
      std::optional<int> first;
      for (int rank = 1; rank < options_.size; ++rank) {
        if (present.contains(rank)) continue;
        if (!first) first = rank;
        missing += fmt::format("{}rank {}", missing.empty() ? "" : ", ", rank);
        for (const auto& [token, name] : hellos)
          if (name.rank == rank) missing += fmt::format(" (an old hello of {} does not answer)", where(name));
      }
      refuse(ErrorKind::timeout,
             fmt::format("{} never came to the meeting in {} within {:.1f} s: are all {} ranks started, with one "
                         "directory and key?",
                         missing, workspace_.path, std::chrono::duration<double>(timeout_).count(), options_.size),
             first);
    }
    if (sync::is_interrupted())
      refuse(
          ErrorKind::cancelled,
          fmt::format("rank 0 (host {}) was interrupted while the ranks met in {}", os::host_name(), workspace_.path),
          0);
    pauses.sleep();
  }
}

Job Meeting::follow() {
  std::set<std::string> read;
  std::optional<MeetingName> caller;
  bool has_died = false;
  Pauses pauses(workspace_.is_network);
  for (;;) {
    const Seen seen = look();
    for (const auto& [file, name] : seen.of(Kind::call)) {
      if (os::life_of(name.writer) == os::Life::dead || !read.insert(file).second) continue;
      std::string tokens;
      try {
        tokens = text_of(file);
      } catch (const Error& error) {
        if (error.kind() == ErrorKind::not_found) continue;  // its rank 0 has given up
        throw;
      }
      if (tokens.find(token_ + "\n") == std::string::npos) continue;
      if (!caller) {
        caller = name;
        write(meeting_file_name({.kind = Kind::here,
                                 .rank = options_.rank,
                                 .token = token_,
                                 .first_token = name.first_token,
                                 .writer = os::own_identity()}),
              {});
      } else if (caller->first_token != name.first_token) {
        for (const std::string& first : {caller->first_token, name.first_token})
          write(meeting_file_name(
                    {.kind = Kind::clash, .rank = options_.rank, .first_token = first, .writer = os::own_identity()}),
                {});
        // Both of rank 0 have to see it; it becomes garbage with this process.
        own_files_.resize(own_files_.size() - 2);
        throw Error(
            ErrorKind::rank_mismatch,
            fmt::format("two of rank 0 ({}; {}) have called rank {}: two jobs meet in {}; give each its own key",
                        where(*caller), where(name), options_.rank, workspace_.path),
            {.rank = 0});
      }
    }
    if (caller) {
      for (const auto& [file, name] : seen.of(Kind::job))
        if (name.first_token == caller->first_token) return take(file);
      if (has_died)
        throw Error(ErrorKind::peer_lost, fmt::format("rank 0 ({}) died while the ranks met", where(*caller)),
                    {.rank = 0, .pid = caller->writer.pid, .host = caller->writer.host});
      // What it wrote last may be younger than this look.
      has_died = os::life_of(caller->writer) == os::Life::dead;
    }
    // Rank 0 knows who is missing: it has the time to say so.
    const auto grace = caller ? std::max<milliseconds>(std::chrono::seconds(1), timeout_ / 10) : milliseconds(0);
    if (is_late(grace))
      throw Error(ErrorKind::timeout,
                  fmt::format("{} in {} within {:.1f} s: are all {} ranks started, with one directory and key?",
                              caller ? fmt::format("rank 0 ({}) did not say who the ranks are", where(*caller))
                                     : "rank 0 never came to the meeting",
                              workspace_.path, std::chrono::duration<double>(timeout_).count(), options_.size),
                  {.rank = 0});
    sync::check_interrupted("file_group");
    pauses.sleep();
  }
}

Job Meeting::take(const std::string& file) {
  const Config text = parse_json(text_of(file));
  if (const Config* error = text.as_object().find("error"))
    throw Error(static_cast<ErrorKind>(std::clamp<std::int64_t>(text.at("kind").as_int(), 0,
                                                                static_cast<std::int64_t>(ErrorKind::cancelled))),
                error->as_string(), {.rank = 0});
  Job job;
  const auto nonce = parse_job(text.at("nonce").as_string());
  const ConfigArray& members = text.at("members").as_array();
  if (!nonce || static_cast<int>(members.size()) != options_.size ||
      members[static_cast<std::size_t>(options_.rank)].at("token").as_string() != token_)
    throw Error(ErrorKind::corrupt, fmt::format("{}/{} does not say who the ranks are", path_, file),
                {.path = path_ + "/" + file});
  job.nonce = *nonce;
  job.directory = workspace_.path + "/" + file_name({.kind = NameKind::job, .job = job_text(job.nonce)});
  for (const Config& member : members) {
    const auto identity = parse_identity(member.at("process").as_string());
    if (!identity) throw Error(ErrorKind::corrupt, "a member of the job is no process");
    const int rank = static_cast<int>(job.members.size());
    job.members.push_back({RankInfo{rank, identity->host, identity->pid}, *identity});
  }
  if (options_.rank == 0) return job;
  const std::string own = job.directory + "/" + member_name(options_.rank, os::own_identity());
  patiently(own, {.deadline = deadline_}, [&] { os::write_new_file(own, {}); });
  return job;
}

}  // namespace

Job meet(const WorkspaceDirectory& workspace, const FileGroupOptions& options, milliseconds timeout) {
  const auto meeting = std::make_shared<Meeting>(workspace, options, timeout);
  Job job = meeting->attend();
  job.meeting = meeting;
  return job;
}

}  // namespace muster::workspace
