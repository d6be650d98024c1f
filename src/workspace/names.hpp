// SPDX-License-Identifier: Apache-2.0
#pragma once
// Builds and parses all names in a workspace. A name is never used twice, except after a failed write. So a cache
// between a rank and the directory cannot return old bytes under a current name.
//
//   muster-workspace.json                         the marker file: this directory is a workspace of a certain version
//   state-JOB-rR-ofN-gG.h5                        rank R's state of generation G of the job of N ranks (NFSWorkspace)
//   kept-JOB-rR-ofN-gG.h5                         rank R's tensors for gather number G, kept for inspection
//   exchange-JOB-rR-ofN-gG@WRITER.h5              the same, deleted when the root has read it
//   token-JOB-rR-RANDOM@WRITER                    proves that two ranks see one directory
//   .probe-RANDOM@WRITER                          made and removed at once: makes a server show new files
//   .growing-RANDOM@WRITER                        a file that does not have its final name yet
//   job-JOB/                                      a file group: rounds, messages, heartbeats (below)
//   meeting-KEY/                                  the rendezvous of the ranks of a file group
//
// JOB is a group's nonce (32 hexadecimal digits), KEY has 16 digits, RANDOM has 16 digits. WRITER is
// HOST,BOOT,PID,START,SPACE. It identifies the process (os/process.hpp), so that leftovers of a dead process can be
// recognised.

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>

#include "src/group/group.hpp"
#include "src/os/process.hpp"

namespace muster::workspace {

enum class NameKind : std::uint8_t { mark, state, kept, exchange, token, probe, growing, job, meeting };
/// Returns text for messages, such as "state" or "file group".
std::string_view to_string(NameKind kind) noexcept;

/// The fields of a name. Fields that do not apply to its kind keep their defaults.
struct Name {
  NameKind kind = NameKind::mark;
  std::string job = {};                            ///< 32 digits
  int rank = -1;                                   ///< -1: not in the name
  int world_size = 0;                              ///< 0: not in the name
  std::uint64_t generation = 0;                    ///< state, kept and exchange only
  std::string random = {};                         ///< 16 digits; the key of a meeting
  std::optional<os::ProcessIdentity> writer = {};  ///< exchange, token, probe and growing only
  friend bool operator==(const Name&, const Name&) = default;
};

/// Returns the file name without a directory. Pure.
std::string file_name(const Name& name);
/// Returns nullopt if the name is not Muster's. file_name(*parse_name(n)) == n. Pure.
std::optional<Name> parse_name(std::string_view file_name);

/// Returns the generations for which `states` has a state of every rank of the job. Pure.
std::set<std::uint64_t> common_generations(std::span<const Name> states, int world_size);

// Make names that this process has not used yet.
std::string growing_name();
std::string probe_name();

/// Returns 32 digits.
std::string job_text(const SyncGroup::Nonce& nonce);
/// Returns nullopt if the text is not 32 digits.
std::optional<SyncGroup::Nonce> parse_job(std::string_view text);

using os::identity_text;
using os::parse_identity;

/// Parses a name from left to right. Every value has exactly one spelling, so a parsed name can be rebuilt. After the
/// first mismatch nothing more is read.
class NameReader {
 public:
  explicit NameReader(std::string_view text) : text_(text) {}

  NameReader& word(std::string_view expected) {
    ok_ = ok_ && text_.starts_with(expected);
    if (ok_) text_.remove_prefix(expected.size());
    return *this;
  }
  NameReader& hex(std::string& target, std::size_t digits) {
    const std::string_view part = text_.substr(0, digits);
    ok_ = ok_ && part.size() == digits && part.find_first_not_of("0123456789abcdef") == std::string_view::npos;
    if (!ok_) return *this;
    target = part;
    text_.remove_prefix(digits);
    return *this;
  }
  /// Reads decimal digits without leading zeros.
  template <class T>
  NameReader& number(T& target) {
    ok_ = ok_ && !text_.empty();
    if (!ok_) return *this;
    T value = 0;
    const auto [end, error] = std::from_chars(text_.data(), text_.data() + text_.size(), value);
    const auto length = static_cast<std::size_t>(end - text_.data());
    ok_ = error == std::errc{} && text_.front() != '-' && (text_.front() != '0' || length == 1);
    if (!ok_) return *this;
    target = value;
    text_.remove_prefix(length);
    return *this;
  }
  /// Reads the rest of the name before the suffix `end`.
  NameReader& rest(std::string& target, std::string_view end = {}) {
    ok_ = ok_ && text_.ends_with(end);
    if (!ok_) return *this;
    target = text_.substr(0, text_.size() - end.size());
    text_.remove_prefix(target.size());
    return *this;
  }
  /// Reads the rest of the name before the suffix `end`, as the process that wrote the file.
  NameReader& writer(os::ProcessIdentity& target, std::string_view end = {}) {
    std::string text;
    rest(text, end);
    const std::optional<os::ProcessIdentity> identity = ok_ ? parse_identity(text) : std::nullopt;
    ok_ = identity.has_value();
    if (ok_) target = *identity;
    return *this;
  }
  [[nodiscard]] bool is_whole() const { return ok_ && text_.empty(); }

 private:
  std::string_view text_;
  bool ok_ = true;
};

// The names in the directory of a file group, and in that of a meeting. Most of these files are empty: a name carries
// the information, so no file needs to be opened.
//
// In job-JOB/ (K: number of the group in the job, R: a rank, N: a counter, L: length in bytes):
//   member-R@WRITER                       the process of rank R
//   beat-R-N                              the heartbeat of rank R, which renames the previous one to this name
//   gone-R                                rank R will not list this directory again
//   gK.pulse-R-N-PROGRESS-AWAITED-PHASE   the current step of rank R, and its progress
//   gK.round-N-R-L                        rank R's record of a round
//   gK.all-N-L                            all ranks' records of the round, written by rank 0
//   gK.message-FROM-TO-SUBJECT-N-L
//   gK.failed                             the group's first failure
//   gK.left-R                             rank R has destroyed the group
//
// In meeting-KEY/ (T: a random token, T0 that of rank 0):
//   hello-VERSION-R-SIZE-T@WRITER         rank R has arrived
//   call-T0-N@WRITER                      rank 0 asks the processes with these tokens to answer
//   here-T0-R-T@WRITER                    rank R's answer
//   told-T0-T-N@WRITER                    message N of that rank to rank 0
//   said-T0-N@WRITER                      message N of rank 0 to all ranks

// Names in a job's directory. The functions that end in _prefix return the part of a name that the reader knows in
// advance.
std::string member_name(int rank, const os::ProcessIdentity& writer);
std::string beat_prefix(int rank);
std::string gone_name(int rank);
std::string pulse_prefix(int group, int rank);
struct PulseName {
  std::uint64_t number = 0;
  std::uint64_t progress = 0;
  std::uint32_t awaited = 0;  ///< the awaited rank plus 1; 0: none
  std::string phase;
};
std::string pulse_name(int group, int rank, const PulseName& pulse);
std::string round_prefix(int group, std::uint64_t number, int rank);
std::string all_prefix(int group, std::uint64_t number);
/// `number` counts the packets from one rank to another.
std::string message_prefix(int group, int from, int to, std::uint64_t number);
std::string failed_name(int group);
std::string left_name(int group, int rank);
/// "gK.", the prefix of all names of a group.
std::string group_prefix(int group);

/// Returns `prefix` followed by a number.
std::string numbered(const std::string& prefix, std::uint64_t number);
/// Returns that number; nullopt if the rest of the name is not a number.
std::optional<std::uint64_t> number_behind(std::string_view name, std::string_view prefix);
/// Parses the rest of a pulse's name.
std::optional<PulseName> pulse_behind(std::string_view name, std::string_view prefix);

/// Whether a file in a job's directory belongs to the group: it has one of the names above, or is growing and will get
/// one.
bool is_group_file(std::string_view name);

/// The fields of a name in a meeting.
struct MeetingName {
  enum class Kind : std::uint8_t { hello, call, here, told, said };
  Kind kind = Kind::hello;
  int version = 0;               ///< hello only
  int rank = 0;                  ///< hello and here
  int size = 0;                  ///< hello only
  std::uint64_t number = 0;      ///< call, told and said
  std::string token = {};        ///< hello, here and told
  std::string first_token = {};  ///< call, here, told and said
  os::ProcessIdentity writer = {};
};
std::string meeting_file_name(const MeetingName& name);
std::optional<MeetingName> parse_meeting_name(std::string_view name);
/// Returns the process that wrote a file in a meeting, under its final or its growing name; nullopt if the file is not
/// Muster's.
std::optional<os::ProcessIdentity> meeting_writer(std::string_view name);
/// The process and the rank in a member's name.
struct MemberName {
  int rank = 0;
  os::ProcessIdentity writer;
};
std::optional<MemberName> parse_member_name(std::string_view name);

}  // namespace muster::workspace
