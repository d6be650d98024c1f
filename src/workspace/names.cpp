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

constexpr std::size_t job_digits = 32;
constexpr std::size_t random_digits = 16;

// One format string per kind of name serves to build and to parse it.

// In the order of the kinds. %j: job, %r: rank, %n: number of ranks, %g: step, %x: random digits, %w: writer.
constexpr std::array<std::string_view, 9> forms = {
    "muster-workspace.json",
    "state-%j-r%r-of%n-g%g.h5",
    "kept-%j-r%r-of%n-g%g.h5",
    "exchange-%j-r%r-of%n-g%g@%w.h5",
    "token-%j-r%r-%x@%w",
    ".probe-%x@%w",
    ".growing-%x@%w",
    "job-%j",
    "meeting-%x",
};

template <class AnyName, class Use>
void use_field(AnyName& name, char field, Use& use) {
  if (field == 'j') return use.digits(name.job, job_digits);
  if (field == 'r') return use.number(name.rank);
  if (field == 'n') return use.number(name.world_size);
  if (field == 'g') return use.number(name.step);
  if (field == 'x') return use.digits(name.random, random_digits);
  use.writer(name.writer);
}

// The names in a meeting. %v: version, %r: rank, %s: size, %c: a counter, %t: token, %f: rank 0's token, %w: writer.
constexpr std::array<std::string_view, 5> meeting_forms = {
    "hello-%v-%r-%s-%t@%w", "call-%f-%c@%w", "here-%f-%r-%t@%w", "told-%f-%t-%c@%w", "said-%f-%c@%w",
};

template <class AnyName, class Use>
void use_meeting_field(AnyName& name, char field, Use& use) {
  if (field == 'v') return use.number(name.version);
  if (field == 'r') return use.number(name.rank);
  if (field == 's') return use.number(name.size);
  if (field == 'c') return use.number(name.number);
  if (field == 't') return use.digits(name.token, random_digits);
  if (field == 'f') return use.digits(name.first_token, random_digits);
  use.writer(name.writer);
}

struct NameBuilder {
  void word(std::string_view word) { text += word; }
  void digits(const std::string& digits, std::size_t) { text += digits; }
  void number(std::uint64_t number) { text += std::to_string(number); }
  void writer(const os::ProcessIdentity& writer) { text += identity_text(writer); }
  void writer(const std::optional<os::ProcessIdentity>& writer) { this->writer(writer.value()); }
  std::string text = {};
  std::string_view behind = {};
};

struct NameParser {
  void word(std::string_view word) { reader.word(word); }
  void digits(std::string& target, std::size_t digits) { reader.hex(target, digits); }
  template <class T>
  void number(T& target) {
    reader.number(target);
  }
  void writer(os::ProcessIdentity& target) { reader.writer(target, behind); }
  void writer(std::optional<os::ProcessIdentity>& target) { writer(target.emplace()); }
  NameReader reader;
  std::string_view behind = {};
};

/// Passes the literal parts and the fields of the format to `use`, in their order.
template <class Use, class UseField>
void walk(std::string_view form, Use& use, const UseField& use_field) {
  for (std::size_t at = 0; at < form.size();) {
    const std::size_t field = std::min(form.find('%', at), form.size());
    use.word(form.substr(at, field - at));
    at = field + 2;
    if (field == form.size()) return;
    use.behind = form.substr(at);
    use_field(form[field + 1]);
  }
}

std::string fresh_name(NameKind kind) {
  return file_name({.kind = kind, .random = os::random_hex(random_digits / 2), .writer = os::own_identity()});
}

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
  NameBuilder builder;
  walk(forms.at(static_cast<std::size_t>(name.kind)), builder, [&](char field) { use_field(name, field, builder); });
  return builder.text;
}

std::optional<Name> parse_name(std::string_view text) {
  for (std::size_t kind = 0; kind < forms.size(); ++kind) {
    Name name{.kind = static_cast<NameKind>(kind)};
    NameParser parser{NameReader(text)};
    walk(forms[kind], parser, [&](char field) { use_field(name, field, parser); });
    const bool has_owner = forms[kind].find("%n") != std::string_view::npos;
    if (parser.reader.is_whole() && (!has_owner || name.rank < name.world_size)) return name;
  }
  return std::nullopt;
}

std::set<std::uint64_t> common_steps(std::span<const Name> states, int world_size) {
  std::map<std::uint64_t, int> ranks;
  for (const Name& state : states) ranks[state.step] += state.world_size == world_size ? 1 : 0;
  std::set<std::uint64_t> common;
  for (const auto& [step, count] : ranks)
    if (count == world_size) common.insert(step);
  return common;
}

std::string growing_name() {
  return fresh_name(NameKind::growing);
}

std::string probe_name() {
  return fresh_name(NameKind::probe);
}

std::string job_text(const Group::Nonce& nonce) {
  return os::hex_text(nonce);
}

std::optional<Group::Nonce> parse_job(std::string_view text) {
  Group::Nonce nonce{};
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
std::string round_prefix(int group, std::uint64_t number, int rank) {
  return fmt::format("g{}.round-{}-{}-", group, number, rank);
}
std::string all_prefix(int group, std::uint64_t number) {
  return fmt::format("g{}.all-{}-", group, number);
}
std::string message_prefix(int group, int from, int to, std::uint64_t number) {
  return fmt::format("g{}.message-{}-{}-{}-", group, from, to, number);
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

std::string numbered(const std::string& prefix, std::uint64_t number) {
  return prefix + std::to_string(number);
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
  NameBuilder builder;
  walk(meeting_forms.at(static_cast<std::size_t>(name.kind)), builder,
       [&](char field) { use_meeting_field(name, field, builder); });
  return builder.text;
}

std::optional<MeetingName> parse_meeting_name(std::string_view text) {
  for (std::size_t kind = 0; kind < meeting_forms.size(); ++kind) {
    MeetingName name{.kind = static_cast<MeetingName::Kind>(kind)};
    NameParser parser{NameReader(text)};
    walk(meeting_forms[kind], parser, [&](char field) { use_meeting_field(name, field, parser); });
    if (parser.reader.is_whole()) return name;
  }
  return std::nullopt;
}

std::optional<os::ProcessIdentity> meeting_writer(std::string_view text) {
  if (const auto name = parse_meeting_name(text)) return name->writer;
  const auto passing = parse_name(text);
  return passing ? passing->writer : std::nullopt;
}

}  // namespace muster::workspace
