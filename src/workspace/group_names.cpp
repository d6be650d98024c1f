// SPDX-License-Identifier: Apache-2.0
#include "src/workspace/group_names.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "src/workspace/names.hpp"

namespace muster::workspace {
namespace {

constexpr std::size_t token_digits = 16;
constexpr std::size_t longest_phase = 80;

std::string phase_text(std::string_view phase) {
  std::string text(phase.substr(0, longest_phase));
  std::ranges::replace_if(
      text, [](char letter) { return letter == '/' || static_cast<unsigned char>(letter) < ' '; }, '_');
  return text;
}

}  // namespace

std::string member_name(int rank, const os::ProcessIdentity& writer) {
  return fmt::format("member-{}@{}", rank, identity_text(writer));
}

std::optional<MemberName> parse_member_name(std::string_view name) {
  MemberName member;
  if (!NameReader(name).word("member-").number(member.rank).word("@").writer(member.writer).is_whole())
    return std::nullopt;
  return member;
}

std::string beat_prefix(int rank) {
  return fmt::format("beat-{}-", rank);
}
std::string beat_name(int rank, std::uint64_t number) {
  return beat_prefix(rank) + std::to_string(number);
}
std::string gone_name(int rank) {
  return fmt::format("gone-{}", rank);
}
std::string pulse_prefix(int group, int rank) {
  return fmt::format("g{}.pulse-{}-", group, rank);
}
std::string pulse_name(int group, int rank, const PulseName& pulse) {
  return fmt::format("{}{}-{}-{}-{}", pulse_prefix(group, rank), pulse.number, pulse.progress, pulse.awaited,
                     phase_text(pulse.phase));
}
std::string round_prefix(int group, std::uint64_t number) {
  return fmt::format("g{}.round-{}-", group, number);
}
std::string round_prefix(int group, std::uint64_t number, int rank) {
  return fmt::format("g{}.round-{}-{}-", group, number, rank);
}
std::string round_name(int group, std::uint64_t number, int rank, std::uint64_t length) {
  return round_prefix(group, number, rank) + std::to_string(length);
}
std::string all_prefix(int group, std::uint64_t number) {
  return fmt::format("g{}.all-{}-", group, number);
}
std::string all_name(int group, std::uint64_t number, std::uint64_t length) {
  return all_prefix(group, number) + std::to_string(length);
}
std::string message_prefix(int group, int from, int to, const MessageNumber& which) {
  return fmt::format("g{}.message-{}-{}-{}-{}-", group, from, to, static_cast<std::uint32_t>(which.subject),
                     which.number);
}
std::string message_name(int group, int from, int to, const MessageNumber& which, std::uint64_t length) {
  return message_prefix(group, from, to, which) + std::to_string(length);
}
std::string failed_name(int group) {
  return fmt::format("g{}.failed", group);
}
std::string left_name(int group, int rank) {
  return fmt::format("g{}.left-{}", group, rank);
}
std::string group_prefix(int group) {
  return fmt::format("g{}.", group);
}

std::optional<std::uint64_t> number_behind(std::string_view name, std::string_view prefix) {
  std::uint64_t number = 0;
  if (!NameReader(name).word(prefix).number(number).is_whole()) return std::nullopt;
  return number;
}

std::optional<PulseName> pulse_behind(std::string_view name, std::string_view prefix) {
  PulseName pulse;
  if (!NameReader(name)
           .word(prefix)
           .number(pulse.number)
           .word("-")
           .number(pulse.progress)
           .word("-")
           .number(pulse.awaited)
           .word("-")
           .rest(pulse.phase)
           .is_whole())
    return std::nullopt;
  return pulse;
}

bool is_group_file(std::string_view name) {
  std::uint64_t number = 0;
  const auto begins = [&](NameReader reader, std::string_view kind) {
    std::string rest;
    return reader.word(kind).number(number).rest(rest).is_whole();
  };
  if (const auto passing = parse_name(name))
    return passing->kind == NameKind::growing || passing->kind == NameKind::probe;
  if (parse_member_name(name) || number_behind(name, "gone-") || begins(NameReader(name), "beat-")) return true;
  const NameReader group = NameReader(name).word("g").number(number).word(".");
  return NameReader(group).word("failed").is_whole() ||
         std::ranges::any_of(std::array{"pulse-", "round-", "all-", "message-", "left-"},
                             [&](std::string_view kind) { return begins(group, kind); });
}

std::string meeting_file_name(const MeetingName& name) {
  using Kind = MeetingName::Kind;
  const std::string writer = identity_text(name.writer);
  switch (name.kind) {
    case Kind::hello:
      return fmt::format("hello-{}-{}-{}-{}@{}", name.version, name.rank, name.size, name.token, writer);
    case Kind::call:
      return fmt::format("call-{}-{}@{}", name.first_token, name.number, writer);
    case Kind::here:
      return fmt::format("here-{}-{}-{}@{}", name.first_token, name.rank, name.token, writer);
    case Kind::clash:
      return fmt::format("clash-{}-{}@{}", name.first_token, name.rank, writer);
    case Kind::job:
      return fmt::format("job-{}@{}", name.first_token, writer);
  }
  return {};
}

std::optional<MeetingName> parse_meeting_name(std::string_view text) {
  using Kind = MeetingName::Kind;
  MeetingName name;
  NameReader reader(text);
  if (text.starts_with("hello-")) {
    name.kind = Kind::hello;
    reader.word("hello-").number(name.version).word("-").number(name.rank).word("-").number(name.size).word("-");
    reader.hex(name.token, token_digits);
  } else if (text.starts_with("call-")) {
    name.kind = Kind::call;
    reader.word("call-").hex(name.first_token, token_digits).word("-").number(name.number);
  } else if (text.starts_with("here-")) {
    name.kind = Kind::here;
    reader.word("here-").hex(name.first_token, token_digits).word("-").number(name.rank).word("-");
    reader.hex(name.token, token_digits);
  } else if (text.starts_with("clash-")) {
    name.kind = Kind::clash;
    reader.word("clash-").hex(name.first_token, token_digits).word("-").number(name.rank);
  } else {
    name.kind = Kind::job;
    reader.word("job-").hex(name.first_token, token_digits);
  }
  if (!reader.word("@").writer(name.writer).is_whole()) return std::nullopt;
  return name;
}

std::optional<os::ProcessIdentity> meeting_writer(std::string_view text) {
  if (const auto name = parse_meeting_name(text)) return name->writer;
  const auto passing = parse_name(text);
  return passing ? passing->writer : std::nullopt;
}

}  // namespace muster::workspace
