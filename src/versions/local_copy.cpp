// SPDX-License-Identifier: Apache-2.0
#include "src/versions/local_copy.hpp"

#include <fmt/core.h>

#include <exception>
#include <utility>

#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/os/clock.hpp"
#include "src/os/directory.hpp"
#include "src/os/process.hpp"
#include "src/versions/version_index.hpp"
#include "src/workspace/discovery.hpp"

namespace muster::versions {
namespace {

constexpr std::uint64_t record_format = 1;
constexpr std::uint64_t longest_marker = std::uint64_t{1} << 16;
constexpr std::uint64_t longest_record = std::uint64_t{1} << 29;
// File systems allow 255 bytes per name.
constexpr std::size_t longest_stem = 160;

std::string sync_path(const std::string& local, std::string_view name) {
  return join_path(join_path(local, std::string(sync_folder)), std::string(name));
}

Digest parsed_digest(const Config& text) {
  if (const std::optional<Digest> digest = parse_digest(text.as_string())) return *digest;
  throw Error(ErrorKind::corrupt, fmt::format("{} is not a digest", in_quotes(text.as_string())));
}

TensorState parsed_tensor(const Config& item) {
  TensorState tensor;
  tensor.name = item.at(std::size_t{0}).as_string();
  const std::optional<DType> dtype = dtype_from_string(item.at(std::size_t{1}).as_string());
  if (!dtype) throw Error(ErrorKind::corrupt, fmt::format("tensor {}: its dtype is unknown", in_quotes(tensor.name)));
  tensor.spec.dtype = *dtype;
  for (const Config& extent : item.at(std::size_t{2}).as_array()) tensor.spec.shape.push_back(extent.as_int());
  tensor.digest = parsed_digest(item.at(std::size_t{3}));
  return tensor;
}

/// Returns the reason why a file is no longer the one of the record; empty if it is.
std::string difference(const CopiedFile& recorded, const std::string& path, bool is_same_boot) {
  const std::optional<os::FileStatus> there = os::file_status(path);
  if (!there || !there->is_regular) return "is missing";
  const CopiedFile now = copied_file(path);
  const bool is_same = now.identity.number == recorded.identity.number && now.bytes == recorded.bytes &&
                       now.changed_ns == recorded.changed_ns &&
                       (!is_same_boot || now.identity.device == recorded.identity.device);
  return is_same ? std::string() : "was changed by another program";
}

/// Returns the reason why the record is void; empty if it is valid.
std::string defect_of(const CopyRecord& record, const LocalCopy& copy, const std::string& local) {
  if (copy.version != record.version)
    return copy.version
               ? fmt::format("its marker has version {}, but its record version {}", *copy.version, record.version)
               : "it has no marker";
  const std::string boot = os::own_identity().boot;
  const bool is_same_boot = record.boot == boot && boot != os::unknown_boot;
  if (record.durability == PullDurability::boot && !is_same_boot)
    return "the host was restarted since, and the copy was not synced";
  for (const auto& [name, file] : record.files)
    if (const std::string words = difference(file, join_path(local, name), is_same_boot); !words.empty())
      return fmt::format("the file {} {}", in_quotes(name), words);
  return {};
}

std::string limit_words(std::chrono::milliseconds timeout) {
  return fmt::format("{:.1f} s", std::chrono::duration<double>(timeout).count());
}

}  // namespace

std::string record_text(const CopyRecord& record) {
  ConfigObject files;
  for (const auto& [name, file] : record.files)
    files.insert(name, Config::object({{"device", file.identity.device},
                                       {"inode", file.identity.number},
                                       {"bytes", file.bytes},
                                       {"changed_ns", file.changed_ns}}));
  ConfigArray tensors;
  tensors.reserve(record.tensors.size());
  for (const TensorState& tensor : record.tensors) {
    ConfigArray shape;
    for (const std::int64_t extent : tensor.spec.shape) shape.emplace_back(extent);
    tensors.push_back(Config::array(
        {tensor.name, to_string(tensor.spec.dtype), Config(std::move(shape)), digest_text(tensor.digest)}));
  }
  return to_json(Config::object({{"muster_copy", record_format},
                                 {"version", record.version},
                                 {"stream", record.stream},
                                 {"index_digest", record.index_digest},
                                 {"durability", record.durability == PullDurability::boot ? "boot" : "synced"},
                                 {"boot", record.boot},
                                 {"state", digest_text(record.state)},
                                 {"files", Config(std::move(files))},
                                 {"tensors", Config(std::move(tensors))}})) +
         "\n";
}

CopyRecord parse_record(std::string_view text) {
  try {
    const Config all = parse_json(text);
    if (const std::uint64_t format = all.at("muster_copy").as_uint(); format != record_format)
      throw Error(ErrorKind::version,
                  fmt::format("the record has format {}, and this Muster reads format {}. Update Muster, or continue: "
                              "the pull makes a new record",
                              format, record_format));
    CopyRecord record;
    record.version = all.at("version").as_uint();
    record.stream = all.at("stream").as_string();
    record.index_digest = all.at("index_digest").as_string();
    const std::string& durability = all.at("durability").as_string();
    if (durability != "boot" && durability != "synced") throw Error(ErrorKind::corrupt, "its durability is unknown");
    record.durability = durability == "boot" ? PullDurability::boot : PullDurability::synced;
    record.boot = all.at("boot").as_string();
    record.state = parsed_digest(all.at("state"));
    for (const auto& [name, file] : all.at("files").as_object()) {
      if (!is_name_beside(name)) throw Error(ErrorKind::corrupt, fmt::format("{} is not a file name", in_quotes(name)));
      record.files.emplace(name, CopiedFile{{file.at("device").as_uint(), file.at("inode").as_uint()},
                                            file.at("bytes").as_uint(),
                                            file.at("changed_ns").as_int()});
    }
    for (const Config& item : all.at("tensors").as_array()) record.tensors.push_back(parsed_tensor(item));
    if (state_digest(record.tensors) != record.state)
      throw Error(ErrorKind::corrupt, "the digest of its tensors does not match");
    return record;
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::version) throw;
    throw Error(ErrorKind::corrupt, fmt::format("the record is damaged: {}", error.what()));
  }
}

std::string marker_text(std::uint64_t version) {
  return to_json(Config::object({{"version", version_digits(version)}})) + "\n";
}

std::optional<std::uint64_t> read_marker(const std::string& local) noexcept {
  try {
    const std::string path = sync_path(local, marker_name);
    if (!os::file_status(path)) return std::nullopt;
    return parse_version_digits(parse_json(read_text(path, longest_marker)).at("version").as_string());
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

CopiedFile copied_file(const std::string& path) {
  const std::optional<os::FileStatus> status = os::file_status(path);
  if (!status) throw file_error(ErrorKind::not_found, "reading the status", path, "the file does not exist");
  return {status->identity, status->bytes,
          std::chrono::duration_cast<std::chrono::nanoseconds>(status->changed.time_since_epoch()).count()};
}

LocalCopy read_local_copy(const std::string& local) {
  LocalCopy copy;
  copy.version = read_marker(local);
  try {
    const std::string path = sync_path(local, record_name);
    if (!os::file_status(path)) {
      copy.reason = copy.version ? "another program wrote it, so it has no record" : "it has no version";
      return copy;
    }
    CopyRecord record = parse_record(read_text(path, longest_record));
    copy.reason = defect_of(record, copy, local);
    if (copy.reason.empty()) copy.record = std::move(record);
  } catch (const Error& error) {
    copy.reason = error.what();
  }
  return copy;
}

std::string lock_path(const std::string& local) {
  std::string name = local.substr(local.find_last_of('/') + 1);
  if (name.size() > longest_stem) {
    Digesting digesting;
    digesting.add(std::as_bytes(std::span(name)));
    name = name.substr(0, longest_stem) + "~" + digest_text(digesting.value());
  }
  return local.substr(0, local.find_last_of('/') + 1) + "." + name + ".muster-lock";
}

CopyLocks::CopyLocks(std::string local, std::chrono::milliseconds timeout, std::function<void()> check)
    : local_(std::move(local)), timeout_(timeout), end_(os::Clock::now() + timeout), check_(std::move(check)) {
  outer_.emplace(lock_path(local_));
  take(*outer_);
}

void CopyLocks::take_inner() {
  os::make_directory(join_path(local_, std::string(sync_folder)));
  inner_.emplace(sync_path(local_, sync_lock_name));
  take(*inner_);
}

void CopyLocks::pass_on(const std::string& successor) {
  const std::string path = sync_path(successor, sync_lock_name);
  if (inner_ && os::link_file(inner_->path(), path)) return;
  next_.emplace(path);
  take(*next_);
}

void CopyLocks::take(os::LockFile& lock) {
  workspace::Pauses pauses(false);
  while (!lock.try_take()) {
    if (check_) check_();
    const std::chrono::milliseconds left = os::Clock::next_sleep(end_);
    if (left.count() <= 0)
      throw file_error(ErrorKind::timeout, "waiting for the lock", lock.path(),
                       fmt::format("another process has been changing {} for {}. End that process (`fuser {}` names "
                                   "it), or wait longer (--lock-timeout, lock_timeout)",
                                   in_quotes(local_), limit_words(timeout_), lock.path()));
    pauses.sleep(left);
  }
}

}  // namespace muster::versions
