// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/journal.hpp"

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <set>
#include <system_error>
#include <tuple>

#include "muster/error.hpp"
#include "muster/model_dir.hpp"
#include "muster/state.hpp"
#include "src/core/parallel.hpp"

namespace muster {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view prefix = "muster-export.";
constexpr std::string_view begin_name = "muster-export.json";

std::string lines_name(int rank) {
  return fmt::format("{}{}.jsonl", prefix, rank);
}

std::string text_of(const std::string& path) {
  const auto file = os::MappedFile::open(path);
  return {reinterpret_cast<const char*>(file->bytes().data()), file->bytes().size()};
}

std::uint64_t length_of_lines(const std::string& path) {
  std::error_code error;
  if (!fs::exists(path, error)) return 0;
  const std::string text = text_of(path);
  const std::size_t last = text.rfind('\n');
  return last == std::string::npos ? 0 : last + 1;
}

os::WritableFile open_or_create(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error) ? os::WritableFile::open(path, path) : os::WritableFile::create(path, path);
}

std::vector<WrittenPart> parse_parts(const Config& list) {
  std::vector<WrittenPart> parts;
  for (const Config& item : list.as_array()) {
    WrittenPart& part = parts.emplace_back();
    part.offset = static_cast<std::uint64_t>(item.at(std::size_t{0}).as_int());
    part.bytes = static_cast<std::uint64_t>(item.at(std::size_t{1}).as_int());
    const std::string& hash = item.at(std::size_t{2}).as_string();
    if (std::from_chars(hash.data(), hash.data() + hash.size(), part.hash, 16).ptr != hash.data() + hash.size())
      throw Error(ErrorKind::corrupt, "a hash in a journal is no number");
  }
  return parts;
}

std::string parts_line(const std::string& file, const std::vector<WrittenPart>& parts) {
  ConfigArray list;
  for (const WrittenPart& part : parts)
    list.push_back(Config::array({static_cast<std::int64_t>(part.offset), static_cast<std::int64_t>(part.bytes),
                                  fmt::format("{:016x}", part.hash)}));
  return to_json(Config::object({{"file", file}, {"parts", std::move(list)}})) + "\n";
}

std::string finished_line(const std::string& file) {
  return to_json(Config::object({{"finished", file}})) + "\n";
}

}  // namespace

bool is_journal_name(std::string_view name) noexcept {
  return name.starts_with(prefix) && (name == begin_name || name.ends_with(".jsonl"));
}

void begin_journal(const std::string& directory, const std::string& fingerprint) {
  write_file(directory + "/" + std::string(begin_name),
             to_json(Config::object({{"muster_export", 1}, {"fingerprint", fingerprint}})) + "\n");
}

void rewrite_journal(const std::string& directory, const std::map<std::string, std::vector<WrittenPart>>& finished) {
  std::string text;
  for (const auto& [file, parts] : finished) text += parts_line(file, parts) + finished_line(file);
  write_file(directory + "/" + lines_name(0), text);
  std::vector<fs::path> others;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    if (is_journal_name(name) && name != begin_name && name != lines_name(0)) others.push_back(entry.path());
  }
  for (const fs::path& other : others) fs::remove(other);
}

void remove_journal(const std::string& directory) {
  std::vector<fs::path> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory))
    if (is_journal_name(entry.path().filename().string())) names.push_back(entry.path());
  for (const fs::path& name : names) fs::remove(name);
}

Journal::Journal(const std::string& directory, int rank)
    : length_(length_of_lines(directory + "/" + lines_name(rank))),
      file_(open_or_create(directory + "/" + lines_name(rank))) {}

void Journal::add_parts(const std::string& file, const std::vector<WrittenPart>& parts) {
  add(parts_line(file, parts));
}

void Journal::add_finished(const std::string& file) {
  add(finished_line(file));
}

void Journal::add(const std::string& text) {
  const std::lock_guard lock(mutex_);
  file_.write_at(length_, std::as_bytes(std::span(text)));
  file_.sync();
  length_ += text.size();
}

std::optional<JournalContents> read_journal(const std::string& directory, const std::string& fingerprint) {
  try {
    const Config begin = parse_json(text_of(directory + "/" + std::string(begin_name)));
    if (begin.at("muster_export").as_int() != 1 || begin.at("fingerprint").as_string() != fingerprint)
      return std::nullopt;
    std::map<std::string, std::vector<WrittenPart>> parts;
    std::set<std::string> finished;
    for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
      const std::string name = entry.path().filename().string();
      if (!is_journal_name(name) || name == begin_name) continue;
      const std::string text = text_of(entry.path().string());
      std::size_t at = 0;
      for (std::size_t end = text.find('\n'); end != std::string::npos; at = end + 1, end = text.find('\n', at)) {
        const Config line = parse_json(std::string_view(text).substr(at, end - at));
        if (const Config* file = line.as_object().find("finished")) {
          finished.insert(file->as_string());
          continue;
        }
        auto& known = parts[line.at("file").as_string()];
        for (const WrittenPart& part : parse_parts(line.at("parts"))) known.push_back(part);
      }
    }
    JournalContents contents;
    for (const std::string& file : finished) {
      std::vector<WrittenPart>& all = parts[file];
      std::ranges::sort(all, {}, [](const WrittenPart& part) { return std::tie(part.offset, part.bytes, part.hash); });
      all.erase(std::unique(all.begin(), all.end()), all.end());
      contents.finished.emplace(file, std::move(all));
    }
    return contents;
  } catch (const std::exception&) {
    // No journal, or not one that can be read: nothing can be said of what is there.
    return std::nullopt;
  }
}

std::string verify_file(const std::string& path, const std::string& header, std::uint64_t bytes,
                        std::vector<WrittenPart> parts) {
  try {
    const auto file = os::MappedFile::open(path);
    const std::span<const std::byte> all = file->bytes();
    if (all.size() != bytes) return fmt::format("it has {} bytes, not {}", all.size(), bytes);
    if (bytes < header.size() || std::memcmp(all.data(), header.data(), header.size()) != 0)
      return "its header is another one";
    const auto is_zero = [&](std::uint64_t begin, std::uint64_t end) {
      const auto gap = all.subspan(begin, end - begin);
      return std::ranges::all_of(gap, [](std::byte byte) { return byte == std::byte{0}; });
    };
    std::ranges::sort(parts, {}, &WrittenPart::offset);
    std::uint64_t covered = header.size();
    for (const WrittenPart& part : parts) {
      if (part.offset > bytes || part.bytes > bytes - part.offset) return "the journal has a part past its end";
      if (part.offset < covered) return fmt::format("the journal has two parts at {}", part.offset);
      // What no part covers is zero: it was padding.
      if (!is_zero(covered, part.offset)) return fmt::format("nobody has written what is at {}", covered);
      covered = part.offset + part.bytes;
    }
    if (!is_zero(covered, bytes)) return fmt::format("nobody has written what is at {}", covered);
    std::atomic<std::uint64_t> differs{bytes};
    parallel_for(parts.size(), copy_workers(), [&](std::size_t i, std::size_t) {
      const auto part = all.subspan(parts[i].offset, parts[i].bytes);
      os::populate_mapped(part, path);
      if (XXH3_64bits(part.data(), part.size()) != parts[i].hash) differs = parts[i].offset;
      os::forget_mapped(part);
    });
    return differs == bytes ? std::string() : fmt::format("what is at {} is not what was written", differs.load());
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace muster
