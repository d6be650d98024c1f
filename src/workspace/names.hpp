// SPDX-License-Identifier: Apache-2.0
#pragma once
// The names in a workspace: built and parsed here and nowhere else. No name is ever used twice (but for one whose write
// failed), so that no cache between a rank and the directory can show old bytes under a current name.
//
//   muster-workspace.json                         the mark: this directory is a workspace, of which version
//   state-JOB-rR-ofN-gG.h5                        rank R's state of generation G of the job of N ranks (NFSWorkspace)
//   kept-JOB-rR-ofN-gG.h5                         what rank R gave to gather number G, left for inspection
//   exchange-JOB-rR-ofN-gG@WRITER.h5              likewise, gone when the first rank has it
//   token-JOB-rR-RANDOM@WRITER                    proves that two ranks see one directory
//   .probe-RANDOM@WRITER                          made and removed at once: makes a server show what is new
//   .growing-RANDOM@WRITER                        a file that has not got its name yet
//   job-JOB/                                      a file group: rounds, messages, heartbeats (below)
//   meeting-KEY/                                  where the ranks of a file group find each other
//
// JOB is a group's nonce (32 hexadecimal digits), KEY 16 digits, RANDOM 16 digits. WRITER is HOST,BOOT,PID,START,SPACE:
// which process it was (os/process.hpp), so that what it left behind can be proved to be nobody's.

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>

#include "src/os/process.hpp"
#include "src/sync/group.hpp"

namespace muster::workspace {

enum class NameKind : std::uint8_t { mark, state, kept, exchange, token, probe, growing, job, meeting };
/// "state", "file group": for people.
std::string_view to_string(NameKind kind) noexcept;

/// What a name says. Fields that its kind has not stay as they are.
struct Name {
  NameKind kind = NameKind::mark;
  std::string job = {};                            ///< 32 digits
  int rank = -1;                                   ///< -1: none
  int world_size = 0;                              ///< 0: none
  std::uint64_t generation = 0;                    ///< of state, kept and exchange
  std::string random = {};                         ///< 16 digits; the key of a meeting
  std::optional<os::ProcessIdentity> writer = {};  ///< of exchange, token, probe, growing
  friend bool operator==(const Name&, const Name&) = default;
};

/// The file name (no directory). Pure.
std::string file_name(const Name& name);
/// None where it is not one of ours. file_name(*parse_name(n)) == n. Pure.
std::optional<Name> parse_name(std::string_view file_name);

/// The generations of which each rank of a job is among its states. Pure.
std::set<std::uint64_t> common_generations(std::span<const Name> states, int world_size);

// Fresh names of this process.
std::string growing_name();
std::string probe_name();

/// 32 digits.
std::string job_text(const SyncGroup::Nonce& nonce);
/// None where these are not 32 digits.
std::optional<SyncGroup::Nonce> parse_job(std::string_view text);

using os::identity_text;
using os::parse_identity;

/// Takes a name apart from left to right. Every value has one spelling, so that a name that was taken apart can be put
/// together again. Once something does not fit, nothing more is taken.
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
  /// Decimal digits without leading zeros.
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
  /// All before `end`, which is what the text ends with.
  NameReader& rest(std::string& target, std::string_view end = {}) {
    ok_ = ok_ && text_.ends_with(end);
    if (!ok_) return *this;
    target = text_.substr(0, text_.size() - end.size());
    text_.remove_prefix(target.size());
    return *this;
  }
  /// Likewise, which is who wrote the file.
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

// The names in the directory of a file group, and in that of a meeting. What can be told by a name needs no file to be
// opened: most of these are empty.
//
// In job-JOB/ (K: number of the group in the job, R: a rank, N: counts up, L: length in bytes):
//   member-R@WRITER                       which process rank R is
//   beat-R-N                              rank R lived when it renamed the last one to this
//   gone-R                                rank R will not look in here again
//   gK.pulse-R-N-PROGRESS-AWAITED-PHASE   what rank R is in, and whether it gets on
//   gK.round-N-R-L                        rank R's record of a round
//   gK.all-N-L                            all ranks' records of it, by rank 0
//   gK.message-FROM-TO-SUBJECT-N-L
//   gK.failed                             the group's first failure
//   gK.left-R                             rank R has destroyed the group
//
// In meeting-KEY/ (T: a random token, T0 that of rank 0):
//   hello-VERSION-R-SIZE-T@WRITER         rank R is here
//   call-T0-N@WRITER                      rank 0 asks: which of these tokens live?
//   here-T0-R-T@WRITER                    rank R's answer
//   told-T0-T-N@WRITER                    message N of that rank to rank 0
//   said-T0-N@WRITER                      message N of rank 0 to all ranks

// In a job's directory. The functions that end in _prefix give all of a name but what the reader does not know yet.
std::string member_name(int rank, const os::ProcessIdentity& writer);
std::string beat_prefix(int rank);
std::string gone_name(int rank);
std::string pulse_prefix(int group, int rank);
struct PulseName {
  std::uint64_t number = 0;
  std::uint64_t progress = 0;
  std::uint32_t awaited = 0;  ///< a rank, and 1; 0: none
  std::string phase;
};
std::string pulse_name(int group, int rank, const PulseName& pulse);
std::string round_prefix(int group, std::uint64_t number, int rank);
std::string all_prefix(int group, std::uint64_t number);
/// `number`: of the packets from one rank to another, in their order.
std::string message_prefix(int group, int from, int to, std::uint64_t number);
std::string failed_name(int group);
std::string left_name(int group, int rank);
/// "gK.": all of a group's names.
std::string group_prefix(int group);

/// A name whose whole rest behind its prefix is a number,
std::string numbered(const std::string& prefix, std::uint64_t number);
/// and that number. None where it is none.
std::optional<std::uint64_t> number_behind(std::string_view name, std::string_view prefix);
/// The rest of a pulse's name.
std::optional<PulseName> pulse_behind(std::string_view name, std::string_view prefix);

/// Whether a file in a job's directory is the group's: of the names above, or on its way to one.
bool is_group_file(std::string_view name);

/// What a name in a meeting says.
struct MeetingName {
  enum class Kind : std::uint8_t { hello, call, here, told, said };
  Kind kind = Kind::hello;
  int version = 0;               ///< of hello
  int rank = 0;                  ///< of hello, here
  int size = 0;                  ///< of hello
  std::uint64_t number = 0;      ///< of call, told, said
  std::string token = {};        ///< of hello, here, told
  std::string first_token = {};  ///< of call, here, told, said
  os::ProcessIdentity writer = {};
};
std::string meeting_file_name(const MeetingName& name);
std::optional<MeetingName> parse_meeting_name(std::string_view name);
/// Who wrote a file in a meeting, be it under one of these names or on its way to one; none: it is not Muster's.
std::optional<os::ProcessIdentity> meeting_writer(std::string_view name);
/// The process of a member's name, and its rank.
struct MemberName {
  int rank = 0;
  os::ProcessIdentity writer;
};
std::optional<MemberName> parse_member_name(std::string_view name);

}  // namespace muster::workspace
