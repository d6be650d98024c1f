// SPDX-License-Identifier: Apache-2.0

#include "src/os/publish.hpp"
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <functional>
#include <optional>
#include <utility>
#include "src/base/escaped.hpp"
#include "src/os/directory.hpp"
#include "src/os/fault.hpp"
#include "src/os/fd.hpp"
#include "src/os/process.hpp"

namespace muster::os {
namespace {

constexpr std::string_view partial_mark = ".partial-";
constexpr std::string_view replaced_mark = ".replaced-";
constexpr std::size_t nonce_digits = 16;
// File systems allow 255 bytes per name; the longest mark, nonce and writer fit into the rest.
constexpr std::size_t longest_stem = 80;

/// Returns the stem of the temporary names for `path`, without the directory.
std::string stem_of(const std::string& path) {
  std::string name = path.substr(path.find_last_of('/') + 1);
  if (name.size() <= longest_stem) return name;
  return fmt::format("{}~{:016x}", name.substr(0, longest_stem - 17), std::hash<std::string>()(name));
}

struct NameParts {
  std::string_view stem;
  std::string_view mark;
  std::string_view tail;
  ProcessIdentity writer;
};

/// Splits "STEM.MARK-NONCE".
std::optional<std::pair<std::string_view, std::string_view>> stem_and_mark(std::string_view text) {
  if (text.size() < nonce_digits ||
      text.find_first_not_of("0123456789abcdef", text.size() - nonce_digits) != std::string_view::npos)
    return std::nullopt;
  text.remove_suffix(nonce_digits);
  for (const std::string_view mark : {partial_mark, replaced_mark})
    if (text.ends_with(mark) && text.size() > mark.size())
      return std::pair(text.substr(0, text.size() - mark.size()), mark);
  return std::nullopt;
}

std::optional<NameParts> parse(std::string_view name) {
  const std::size_t at = name.rfind('@');
  if (at == std::string_view::npos) return std::nullopt;
  const auto writer = parse_identity(name.substr(at + 1));
  const auto begin = stem_and_mark(name.substr(0, at));
  if (!writer || !begin) return std::nullopt;
  return NameParts{begin->first, begin->second, name.substr(at - nonce_digits), *writer};
}

std::string beside(const std::string& path, const std::string& name) {
  return path.substr(0, path.find_last_of('/') + 1) + name;
}

std::string growing_path(const std::string& path, const std::string& temporary) {
  if (temporary.empty()) return partial_name(path);
  if (temporary.find('/') == std::string::npos) return beside(path, temporary);
  if (directory_of(temporary) != directory_of(path))
    throw Error(
        ErrorKind::invalid_argument,
        fmt::format("{}: writing: the temporary name {} is in another directory. Pass a name without a directory",
                    in_quotes(path), in_quotes(temporary)),
        {.path = path});
  return temporary;
}

// Without this check, a rename would replace a device, a pipe or a link by a file.
void check_replaceable(const std::string& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0 || S_ISREG(status.st_mode)) return;
  const char* const what = S_ISLNK(status.st_mode)   ? "a link"
                           : S_ISDIR(status.st_mode) ? "a directory"
                                                     : "a device or a pipe";
  throw Error(
      ErrorKind::invalid_argument,
      fmt::format("{}: writing: it is {}, which a file must not replace. Choose another name", in_quotes(path), what),
      {.path = path});
}

/// Returns whether the name belongs to this file; then a failed step had in fact succeeded (step 3). Preserves errno.
bool is_at(const std::string& path, const FileIdentity& file) noexcept {
  const int error = errno;
  struct stat status {};
  const bool is_there = ::lstat(path.c_str(), &status) == 0 && FileIdentity{status.st_dev, status.st_ino} == file;
  errno = error;
  return is_there;
}

bool is_there(const std::string& path) noexcept {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0;
}

/// For file systems without hard links: the creation decides who is first. A reader that reads the file too early must
/// read it again.
bool create_first(const std::string& path, std::span<const std::byte> bytes, Durability durability) {
  try {
    write_new_file(path, bytes, durability);
    return true;
  } catch (const Error& error) {
    if (error.os_error() != EEXIST) throw;
    return false;
  }
}

[[noreturn]] void refuse_taken(const std::string& path) {
  throw Error(ErrorKind::invalid_argument, fmt::format("{} already exists", in_quotes(path)),
              {.path = path, .os_error = EEXIST});
}

/// Whether renameat2() with flags is unavailable: the file system lacks the flag (EINVAL), the kernel lacks the call,
/// or a sandbox forbids it (ENOSYS, EPERM). If a rename is really forbidden, the plain rename also fails.
bool lacks_flags(int error) {
  return error == EINVAL || error == ENOSYS || error == EPERM;
}

/// Returns false if the file system does not support it.
bool exchange_names(const std::string& a, const std::string& b) {
  const auto exchange = [&] { return ::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE); };
  if (try_call("exchange", b, exchange) == 0) return true;
  if (lacks_flags(errno)) return false;
  throw errno_error(fmt::format("exchanging it with {}", in_quotes(a)), errno, b);
}

}  // namespace

PublishedFile::PublishedFile(Unchecked /*tag*/, const std::string& path, std::string partial)
    : partial_(std::move(partial)), owner_pid_(process_id()), file_(WritableFile::create(partial_, path)) {}

PublishedFile::PublishedFile(const std::string& path, const std::string& temporary)
    : PublishedFile(Unchecked{}, path, (check_replaceable(path), growing_path(path, temporary))) {
  // The replacement of a file must not be accessible to more users than that file.
  if (const std::optional<Rights> rights = rights_of(path)) set_rights(partial_, *rights);
}

PublishedFile::PublishedFile(PublishedFile&& other) noexcept
    : partial_(std::exchange(other.partial_, std::string())),
      owner_pid_(other.owner_pid_),
      file_(std::move(other.file_)) {}

PublishedFile& PublishedFile::operator=(PublishedFile&& other) noexcept {
  if (this != &other) {
    discard();
    partial_ = std::exchange(other.partial_, std::string());
    owner_pid_ = other.owner_pid_;
    file_ = std::move(other.file_);
  }
  return *this;
}

PublishedFile::~PublishedFile() {
  discard();
}

void PublishedFile::discard() noexcept {
  if (!partial_.empty() && owner_pid_ == process_id()) ::unlink(partial_.c_str());
  partial_.clear();
}

FileIdentity PublishedFile::finish(Durability durability) {
  if (durability == Durability::synced) file_.sync();
  const FileIdentity ours = file_.identity();
  file_.close();
  return ours;
}

void PublishedFile::commit(Durability durability) {
  const FileIdentity ours = finish(durability);
  if (try_call("rename", path(), [&] { return ::rename(partial_.c_str(), path().c_str()); }) != 0 &&
      !(errno == ENOENT && is_at(path(), ours)))
    throw errno_error("renaming the finished file to", errno, path());
  partial_.clear();
  if (durability == Durability::synced) sync_directory(directory_of(path()));
}

void publish(const std::string& path, std::span<const std::byte> bytes, const std::string& temporary,
             Durability durability) {
  PublishedFile file(PublishedFile::Unchecked{}, path, growing_path(path, temporary));
  file.write_at(0, bytes);
  file.commit(durability);
}

bool publish_first(const std::string& path, std::span<const std::byte> bytes, const std::string& temporary,
                   Durability durability) {
  PublishedFile file(PublishedFile::Unchecked{}, path, growing_path(path, temporary));
  file.write_at(0, bytes);
  const FileIdentity ours = file.finish(durability);
  bool is_first = true;
  if (try_call("link", path, [&] { return ::link(file.temporary().c_str(), path.c_str()); }) != 0) {
    const bool has_links = errno != EPERM && errno != EMLINK && errno != EOPNOTSUPP && errno != ENOSYS;
    if (has_links && errno != EEXIST) throw errno_error("creating a hard link", errno, path);
    // A failed check throws, so that no writer mistakes another writer's file for its own or the reverse.
    const std::optional<FileStatus> there = has_links ? file_status(path) : std::nullopt;
    is_first = has_links ? there && there->identity == ours : create_first(path, bytes, durability);
  }
  file.discard();
  if (durability == Durability::synced) sync_directory(directory_of(path));
  return is_first;
}

void write_new_file(const std::string& path, std::span<const std::byte> bytes, Durability durability) {
  WritableFile file = WritableFile::create(path, path);
  try {
    file.write_at(0, bytes);
    if (durability == Durability::synced) file.sync();
    file.close();
  } catch (...) {
    ::unlink(path.c_str());
    throw;
  }
}

void rename_to_new(const std::string& from, const std::string& to) {
  const std::optional<FileStatus> ours = file_status(from);
  const auto rename = [&] { return ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE); };
  if (try_call("rename", to, rename) == 0) return;
  if (lacks_flags(errno)) {
    // Without the flag, rename replaces nothing except an empty directory.
    if (is_there(to)) refuse_taken(to);
    if (try_call("plain-rename", to, [&] { return ::rename(from.c_str(), to.c_str()); }) == 0) return;
  }
  const int error = errno;
  if (ours && is_at(to, ours->identity) && !is_there(from)) return;
  if (error == EEXIST || error == ENOTEMPTY) refuse_taken(to);
  throw errno_error(fmt::format("renaming {} to this name", in_quotes(from)), error, to);
}

std::string replace_directory(const std::string& partial, const std::string& path) {
  if (exchange_names(partial, path)) return partial;
  const std::size_t mark = partial.rfind(partial_mark);
  std::string replaced =
      partial.substr(0, mark) + std::string(replaced_mark) + partial.substr(mark + partial_mark.size());
  rename_to_new(path, replaced);
  try {
    rename_to_new(partial, path);
  } catch (...) {
    rename_to_new(replaced, path);
    throw;
  }
  return replaced;
}

std::string partial_name(const std::string& path) {
  return beside(path, fmt::format("{}{}{}@{}", stem_of(path), partial_mark, random_hex(nonce_digits / 2),
                                  identity_text(own_identity())));
}

bool is_partial_name(std::string_view name) noexcept {
  try {
    if (parse(name)) return true;
    const auto old = stem_and_mark(name);
    return old && old->second == partial_mark;
  } catch (const std::exception&) {
    return false;
  }
}

std::string released_name(const std::string& partial) {
  ProcessIdentity nobody = own_identity();
  nobody.pid = 0;
  nobody.start = 0;
  return partial.substr(0, partial.rfind('@') + 1) + identity_text(nobody);
}

std::vector<Unfinished> unfinished_of(const std::string& path) {
  std::vector<Unfinished> found;
  const std::string stem = stem_of(path);
  for (const DirectoryEntry& entry : list_directory(directory_of(path)))
    if (const auto parts = parse(entry.name); parts && parts->stem == stem)
      found.push_back(
          {beside(path, entry.name), std::string(parts->tail), parts->mark == replaced_mark, parts->writer});
  return found;
}

void remove_dead_partials(const std::string& path) noexcept {
  try {
    for (const Unfinished& one : unfinished_of(path)) {
      if (life_of(one.writer) != Life::dead) continue;
      try {
        remove_file(one.path);
      } catch (const Error&) {
        // The next file may still be removable.
      }
    }
  } catch (const std::exception&) {
    // Files that cannot be listed do no harm.
  }
}

std::optional<Rights> rights_of(const std::string& path) {
  struct stat status {};
  if (try_call("stat", path, [&] { return ::lstat(path.c_str(), &status); }) == 0)
    return Rights{status.st_mode & 07777U, status.st_uid, status.st_gid};
  if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
  throw errno_error("reading the owner and mode of", errno, path);
}

void set_rights(const std::string& path, const Rights& rights) {
  const std::optional<Rights> now = rights_of(path);
  std::uint32_t mode = rights.mode;
  const auto give = [&](std::uint32_t owner) {
    return try_call("chown", path, [&] { return ::lchown(path.c_str(), owner, rights.group); }) == 0;
  };
  const bool differs = now && (now->owner != rights.owner || now->group != rights.group);
  if (differs && !give(rights.owner) && now->group != rights.group && !give(static_cast<std::uint32_t>(-1)))
    mode &= ~static_cast<std::uint32_t>(S_IRWXG | S_IRWXO | S_ISGID);
  if (now && !differs && now->mode == mode) return;
  // Some file systems have no modes.
  if (try_call("chmod", path, [&] { return ::chmod(path.c_str(), mode); }) != 0 && errno != EPERM &&
      errno != EOPNOTSUPP && errno != ENOSYS)
    throw errno_error("setting the mode of", errno, path);
}

}  // namespace muster::os
