// SPDX-License-Identifier: Apache-2.0
#pragma once
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
//   clash-T0-R@WRITER                     rank R was called by two of rank 0
//   job-T0@WRITER                         who the ranks are, or why there is no job

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "muster/sync_group.hpp"
#include "src/os/process.hpp"

namespace muster::workspace {

// In a job's directory. The functions that end in _prefix give all of a name but what the reader does not know yet.
std::string member_name(int rank, const os::ProcessIdentity& writer);
std::string beat_prefix(int rank);
std::string beat_name(int rank, std::uint64_t number);
std::string gone_name(int rank);
std::string pulse_prefix(int group, int rank);
struct PulseName {
  std::uint64_t number = 0;
  std::uint64_t progress = 0;
  std::uint32_t awaited = 0;  ///< a rank, and 1; 0: none
  std::string phase;
};
std::string pulse_name(int group, int rank, const PulseName& pulse);
std::string round_prefix(int group, std::uint64_t number);
std::string round_prefix(int group, std::uint64_t number, int rank);
std::string round_name(int group, std::uint64_t number, int rank, std::uint64_t length);
std::string all_prefix(int group, std::uint64_t number);
std::string all_name(int group, std::uint64_t number, std::uint64_t length);
/// Of each subject's messages from one rank to another, in their order.
struct MessageNumber {
  Subject subject = Subject::caller;
  std::uint64_t number = 0;
};
std::string message_prefix(int group, int from, int to, const MessageNumber& which);
std::string message_name(int group, int from, int to, const MessageNumber& which, std::uint64_t length);
std::string failed_name(int group);
std::string left_name(int group, int rank);
/// "gK.": all of a group's names.
std::string group_prefix(int group);

/// The number that is the whole rest of a name behind its prefix. None where it is none.
std::optional<std::uint64_t> number_behind(std::string_view name, std::string_view prefix);
/// The rest of a pulse's name.
std::optional<PulseName> pulse_behind(std::string_view name, std::string_view prefix);

/// Whether a file in a job's directory is the group's: of the names above, or on its way to one.
bool is_group_file(std::string_view name);

/// What a name in a meeting says.
struct MeetingName {
  enum class Kind : std::uint8_t { hello, call, here, clash, job };
  Kind kind = Kind::hello;
  int version = 0;               ///< of hello
  int rank = 0;                  ///< of hello, here, clash
  int size = 0;                  ///< of hello
  std::uint64_t number = 0;      ///< of call
  std::string token = {};        ///< of hello, here
  std::string first_token = {};  ///< of call, here, clash, job
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
