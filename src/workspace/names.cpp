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

}  // namespace muster::workspace
