// SPDX-License-Identifier: Apache-2.0
#include "src/workspace/names.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <string_view>

#include "src/os/process.hpp"

namespace muster::workspace {
namespace {

constexpr std::string_view mark_name = "muster-workspace.json";
constexpr std::string_view state_end = ".h5";
constexpr std::size_t job_digits = 32;
constexpr std::size_t random_digits = 16;

/// "JOB-rR-ofN-gG"
std::string owner_text(const Name& name) {
  return fmt::format("{}-r{}-of{}-g{}", name.job, name.rank, name.world_size, name.generation);
}

NameReader& owner(NameReader& reader, Name& name) {
  return reader.hex(name.job, job_digits)
      .word("-r")
      .number(name.rank)
      .word("-of")
      .number(name.world_size)
      .word("-g")
      .number(name.generation);
}

std::string writer_text(const Name& name) {
  return name.writer ? identity_text(*name.writer) : std::string();
}

std::string fresh_name(NameKind kind) {
  Name name;
  name.kind = kind;
  name.random = os::random_hex(random_digits / 2);
  name.writer = os::own_identity();
  return file_name(name);
}

constexpr std::size_t token_digits = 16;
constexpr std::size_t longest_phase = 80;

std::string phase_text(std::string_view phase) {
  std::string text(phase.substr(0, longest_phase));
  std::ranges::replace_if(
      text, [](char letter) { return letter == '/' || static_cast<unsigned char>(letter) < ' '; }, '_');
  return text;
}

}  // namespace

std::string_view to_string(NameKind kind) noexcept {
  // In the order of the kinds.
  constexpr std::array<std::string_view, 9> names = {"mark",  "state",        "kept",       "exchange", "token",
                                                     "probe", "growing file", "file group", "meeting"};
  static_assert(names.size() == std::size_t{static_cast<std::uint8_t>(NameKind::meeting)} + 1);
  const auto number = static_cast<std::uint8_t>(kind);
  return number < names.size() ? names[number] : "unknown";
}

std::string file_name(const Name& name) {
  switch (name.kind) {
    case NameKind::mark:
      return std::string(mark_name);
    case NameKind::state:
      return fmt::format("state-{}{}", owner_text(name), state_end);
    case NameKind::kept:
      return fmt::format("kept-{}{}", owner_text(name), state_end);
    case NameKind::exchange:
      return fmt::format("exchange-{}@{}{}", owner_text(name), writer_text(name), state_end);
    case NameKind::token:
      return fmt::format("token-{}-r{}-{}@{}", name.job, name.rank, name.random, writer_text(name));
    case NameKind::probe:
      return fmt::format(".probe-{}@{}", name.random, writer_text(name));
    case NameKind::growing:
      return fmt::format(".growing-{}@{}", name.random, writer_text(name));
    case NameKind::job:
      return "job-" + name.job;
    case NameKind::meeting:
      return "meeting-" + name.random;
  }
  return {};
}

std::optional<Name> parse_name(std::string_view text) {
  Name name;
  if (text == mark_name) return name;
  const auto whole = [&](NameKind kind, const NameReader& reader) -> std::optional<Name> {
    const bool has_owner = kind == NameKind::state || kind == NameKind::kept || kind == NameKind::exchange;
    if (!reader.is_whole() || (has_owner && name.rank >= name.world_size)) return std::nullopt;
    name.kind = kind;
    return name;
  };
  NameReader reader(text);
  if (text.starts_with("state-")) return whole(NameKind::state, owner(reader.word("state-"), name).word(state_end));
  if (text.starts_with("kept-")) return whole(NameKind::kept, owner(reader.word("kept-"), name).word(state_end));
  if (text.starts_with("exchange-"))
    return whole(NameKind::exchange,
                 owner(reader.word("exchange-"), name).word("@").writer(name.writer.emplace(), state_end));
  if (text.starts_with("token-"))
    return whole(NameKind::token, reader.word("token-")
                                      .hex(name.job, job_digits)
                                      .word("-r")
                                      .number(name.rank)
                                      .word("-")
                                      .hex(name.random, random_digits)
                                      .word("@")
                                      .writer(name.writer.emplace()));
  if (text.starts_with(".probe-"))
    return whole(NameKind::probe,
                 reader.word(".probe-").hex(name.random, random_digits).word("@").writer(name.writer.emplace()));
  if (text.starts_with(".growing-"))
    return whole(NameKind::growing,
                 reader.word(".growing-").hex(name.random, random_digits).word("@").writer(name.writer.emplace()));
  if (text.starts_with("job-")) return whole(NameKind::job, reader.word("job-").hex(name.job, job_digits));
  if (text.starts_with("meeting-"))
    return whole(NameKind::meeting, reader.word("meeting-").hex(name.random, random_digits));
  return std::nullopt;
}

std::set<std::uint64_t> common_generations(std::span<const Name> states, int world_size) {
  std::map<std::uint64_t, int> ranks;
  for (const Name& state : states) ranks[state.generation] += state.world_size == world_size ? 1 : 0;
  std::set<std::uint64_t> common;
  for (const auto& [generation, count] : ranks)
    if (count == world_size) common.insert(generation);
  return common;
}

std::string growing_name() {
  return fresh_name(NameKind::growing);
}

std::string probe_name() {
  return fresh_name(NameKind::probe);
}

std::string job_text(const SyncGroup::Nonce& nonce) {
  std::string text;
  for (const std::byte byte : nonce) text += fmt::format("{:02x}", std::to_integer<unsigned>(byte));
  return text;
}

std::optional<SyncGroup::Nonce> parse_job(std::string_view text) {
  SyncGroup::Nonce nonce{};
  if (text.size() != job_digits || text.find_first_not_of("0123456789abcdef") != std::string_view::npos)
    return std::nullopt;
  for (std::size_t i = 0; i < nonce.size(); ++i) {
    unsigned value = 0;
    std::from_chars(text.data() + 2 * i, text.data() + 2 * i + 2, value, 16);
    nonce[i] = static_cast<std::byte>(value);
  }
  return nonce;
}

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
