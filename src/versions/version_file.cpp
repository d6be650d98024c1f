// SPDX-License-Identifier: Apache-2.0
#include "src/versions/version_file.hpp"

#include <algorithm>
#include <utility>

#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/formats/safetensors.hpp"
#include "src/os/directory.hpp"

namespace muster::versions {
namespace {

constexpr std::size_t buffer_bytes = 1 << 20;
// The most that an entry of a header needs in addition to its name, its shape and its checksum.
constexpr std::size_t entry_bytes = 128;
constexpr std::size_t extent_bytes = 20;
constexpr std::uint64_t most_padding = 64 << 10;
constexpr std::uint64_t moved_at_once = 16 << 20;

/// Returns the most bytes that a header of these tensors can have. The name of a tensor also occurs in the metadata.
std::uint64_t most_header_bytes(std::span<const TensorEntry> tensors) {
  std::uint64_t bytes = entry_bytes;
  for (const TensorEntry& tensor : tensors)
    bytes += 2 * to_json(Config(tensor.name)).size() + entry_bytes + tensor.shape.size() * extent_bytes;
  return (bytes + 7) / 8 * 8;
}

}  // namespace

AppendedFile::AppendedFile(const std::string& path, std::span<const TensorEntry> tensors)
    : file_(os::WritableFile::create(path, path)),
      header_bytes_(most_header_bytes(tensors)),
      begin_(header_bytes_),
      end_(header_bytes_),
      written_(header_bytes_) {
  buffer_.reserve(buffer_bytes);
}

void AppendedFile::append(std::span<const std::byte> bytes) {
  end_ += bytes.size();
  if (buffer_.size() + bytes.size() <= buffer_bytes) {
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
    return;
  }
  flush();
  file_.write_at(written_, bytes);
  file_.start_writeback(written_, bytes.size());
  written_ += bytes.size();
}

void AppendedFile::flush() {
  if (buffer_.empty()) return;
  file_.write_at(written_, buffer_);
  file_.start_writeback(written_, buffer_.size());
  written_ += buffer_.size();
  buffer_.clear();
}

void AppendedFile::end_tensor(const std::string& name, const TensorSpec& spec, const std::string& checksum) {
  tensors_.push_back({name, spec.dtype, spec.shape, begin_, end_ - begin_});
  if (!checksum.empty()) metadata_[name] = checksum;
  begin_ = end_;
}

void AppendedFile::shorten(std::uint64_t header_bytes, const std::function<void()>& check) {
  const std::uint64_t saved = header_bytes_ - header_bytes;
  const std::string path = file_.name();
  const os::ReadableFile all = os::ReadableFile::open(path);
  os::remove_file(path);
  file_ = os::WritableFile::create(path, path);
  for (std::uint64_t at = header_bytes_; at < end_; at += moved_at_once) {
    file_.copy_from(all, at, at - saved, std::min(moved_at_once, end_ - at));
    check();
  }
  for (TensorEntry& entry : tensors_) entry.offset -= saved;
  end_ -= saved;
  header_bytes_ = header_bytes;
}

FileFacts AppendedFile::finish(const std::function<void()>& check) {
  flush();
  if (const std::uint64_t needed = most_header_bytes(tensors_); needed + most_padding < header_bytes_)
    shorten(needed, check);
  const std::string header = make_safetensors_header(tensors_, metadata_, file_.name(), header_bytes_);
  file_.write_at(0, std::as_bytes(std::span(header)));
  file_.sync();
  file_.close();
  // Read again, because the digest begins with the header, which was written last.
  return {end_, digest_of_file(file_.name(), [&](std::uint64_t) { check(); })};
}

VersionWriter::VersionWriter(const std::string& path, std::span<const TensorEntry> tensors, VersionKind kind,
                             DeltaEncoding encoding, const OldVersion* old, bool digests_old)
    : file_(path, tensors),
      kind_(kind),
      old_(old),
      digests_old_(digests_old),
      encoder_(encoding, [this](std::span<const std::byte> bytes) { file_.append(bytes); }),
      piece_(piece_bytes) {}

VersionWriter::~VersionWriter() = default;

void VersionWriter::begin(const TensorEntry& tensor) {
  tensors_.push_back({tensor.name, {tensor.dtype, tensor.shape}, {}, {}, true, 0});
  digesting_ = Digesting();
  if (kind_ == VersionKind::full) return;
  reader_ = old_->reader(tensor.name, digests_old_);
  const std::uint64_t elements = static_cast<std::uint64_t>(element_count(tensor.shape));
  try {
    encoder_.begin(tensor.bytes, elements == 0 ? 1 : std::max<std::uint64_t>(tensor.bytes / elements, 1));
  } catch (const Error& error) {
    throw error.with_context("tensor " + in_quotes(tensor.name));
  }
}

void VersionWriter::add(std::span<const std::byte> new_bytes) {
  while (!new_bytes.empty()) {
    const auto piece = new_bytes.first(std::min(new_bytes.size(), piece_.size()));
    new_bytes = new_bytes.subspan(piece.size());
    digesting_.add(piece);
    if (kind_ == VersionKind::full) {
      file_.append(piece);
      continue;
    }
    const std::span<std::byte> old = std::span(piece_).first(piece.size());
    reader_->next(old);
    encoder_.add(piece, old);
  }
}

void VersionWriter::end() {
  NewTensor& tensor = tensors_.back();
  tensor.digest = digesting_.value();
  if (kind_ == VersionKind::full) {
    file_.end_tensor(tensor.name, tensor.spec, {});
    return;
  }
  reader_->end();
  if (digests_old_) tensor.old_digest = reader_->digest();
  reader_.reset();
  tensor.is_changed = encoder_.end();
  tensor.changed_elements = encoder_.changed_elements();
  if (!tensor.is_changed) return;
  const TensorSpec frame{DType::u8, {static_cast<std::int64_t>(file_.tensor_bytes())}};
  file_.end_tensor(tensor.name, frame, digest_text(tensor.digest));
}

std::optional<FileFacts> VersionWriter::finish(const std::function<void()>& check) {
  if (!file_.empty()) return file_.finish(check);
  os::remove_file(file_.path());
  return std::nullopt;
}

}  // namespace muster::versions
