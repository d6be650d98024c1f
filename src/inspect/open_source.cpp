// SPDX-License-Identifier: Apache-2.0
// What a path is, told by what is there and not by its name.

#include <fmt/core.h>

#include <cerrno>
#include <filesystem>

#include "muster/error.hpp"
#include "muster/state.hpp"
#include "muster/state_file.hpp"
#include "src/checkpoint/shard_files.hpp"
#include "src/inspect/foreign_hdf5.hpp"
#include "src/inspect/printable.hpp"
#include "src/inspect/state_source.hpp"
#include "src/inspect/tensor_source.hpp"
#include "src/os/file.hpp"

namespace muster::inspect {
namespace {

// What is smaller is not worth a system call to be brought into memory at once.
constexpr std::size_t least_populated = std::size_t{1} << 20;

/// safetensors: one file, or those of a directory.
class ModelSource : public TensorSource {
 public:
  explicit ModelSource(ModelDir model) : model_(std::move(model)) {
    std::error_code error;
    is_directory_ = std::filesystem::is_directory(model_.path(), error);
  }
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return model_.tensors(); }
  [[nodiscard]] std::optional<std::size_t> find(std::string_view name) const noexcept override {
    return model_.find(name);
  }
  [[nodiscard]] std::unique_ptr<PieceBytes> read(std::size_t tensor, std::uint64_t offset,
                                                 std::uint64_t length) const override {
    const SafetensorsFile& file = model_.file_of(tensor);
    const std::size_t index = *file.find(model_.tensors()[tensor].name);
    if (!file.is_mapped()) {
      std::vector<std::byte> bytes(length);
      file.read(index, offset, bytes);
      return std::make_unique<PieceBytes>(std::move(bytes));
    }
    const std::span<const std::byte> bytes = file.tensor(index).bytes().subspan(offset, length);
    if (length >= least_populated) os::populate_mapped(bytes, file.path());
    return std::make_unique<PieceBytes>(bytes);
  }
  [[nodiscard]] std::map<std::string, std::string> metadata() const override { return model_.metadata(); }
  [[nodiscard]] std::string_view kind() const noexcept override { return is_directory_ ? "model" : "safetensors"; }
  [[nodiscard]] std::vector<SourceFile> files() const override {
    std::vector<SourceFile> files;
    for (const SafetensorsFile& file : model_.files()) {
      SourceFile& out = files.emplace_back(SourceFile{file.path(), 0, file.tensors().size()});
      for (const TensorEntry& entry : file.tensors()) out.bytes += entry.bytes;
    }
    return files;
  }
  [[nodiscard]] TensorDetail detail(std::size_t tensor) const override {
    return {.file = model_.file_of(tensor).path(), .stored_bytes = model_.tensors()[tensor].bytes};
  }
  [[nodiscard]] std::optional<std::string> config_text() const override {
    if (!is_directory_) {
      // What a state's config became when it was converted.
      if (!model_.metadata().contains(std::string(config_metadata_key))) return std::nullopt;
      return to_json(config_from_metadata(model_.metadata()));
    }
    const std::optional<Config> config = read_model_config(model_.path());
    if (!config) return std::nullopt;
    return to_json(*config);
  }

 private:
  ModelDir model_;
  bool is_directory_ = false;
};

/// HDF5 that other programs made.
class Hdf5Source : public TensorSource {
 public:
  explicit Hdf5Source(std::unique_ptr<ForeignHdf5> file, std::vector<SourceIssue> issues = {})
      : file_(std::move(file)), issues_(std::move(issues)) {
    for (const ForeignIssue& issue : file_->issues()) issues_.push_back({"not shown", issue.path, issue.words});
  }
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return file_->tensors(); }
  [[nodiscard]] std::optional<std::size_t> find(std::string_view name) const noexcept override {
    return file_->find(name);
  }
  [[nodiscard]] std::unique_ptr<PieceBytes> read(std::size_t tensor, std::uint64_t offset,
                                                 std::uint64_t length) const override {
    return file_->read(tensor, offset, length);
  }
  [[nodiscard]] std::map<std::string, std::string> metadata() const override { return file_->metadata(); }
  [[nodiscard]] std::string_view kind() const noexcept override { return "hdf5"; }
  [[nodiscard]] TensorDetail detail(std::size_t tensor) const override {
    const std::uint64_t stored = file_->stored_bytes(tensor);
    return {.stored_bytes = stored, .is_compressed = stored != file_->tensors()[tensor].bytes};
  }
  [[nodiscard]] std::vector<SourceIssue> reader_issues() const override { return issues_; }

 private:
  std::unique_ptr<ForeignHdf5> file_;
  std::vector<SourceIssue> issues_;
};

/// h5repack and the like copy a commit mark that does not belong to the new file: then it is HDF5 like any other.
std::unique_ptr<TensorSource> open_state(const std::string& path) {
  try {
    return std::make_unique<StateSource>(StateFile::open(path));
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::corrupt) throw;
    try {
      std::vector<SourceIssue> issues = {{"incomplete", "", error.what()}};
      return std::make_unique<Hdf5Source>(ForeignHdf5::open(path), std::move(issues));
    } catch (const Error&) {
      throw error;
    }
  }
}

/// "No such file" would be told of a name that people see in the directory.
void refuse_dangling(const std::string& path) {
  std::error_code error;
  const std::filesystem::path target = std::filesystem::read_symlink(path, error);
  if (!error)
    throw Error(ErrorKind::not_found,
                fmt::format("opening {}: it is a link to {}, which is not there", path, target.string()),
                {.path = path, .os_error = ENOENT});
}

}  // namespace

std::unique_ptr<TensorSource> open_source(const std::string& path, const SourceOptions& options) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) refuse_dangling(path);
  if (std::filesystem::is_directory(status)) {
    if (is_shards_directory(path)) return open_shards(path, options);
    if (is_workspace_directory(path))
      return options.plan.empty() ? open_states(path, options.states) : open_shards(path, options);
    return std::make_unique<ModelSource>(ModelDir::open(path));
  }
  if (StateFile::is_state_file(path)) return open_state(path);
  if (is_hdf5_file(path)) return std::make_unique<Hdf5Source>(ForeignHdf5::open(path));
  return std::make_unique<ModelSource>(ModelDir::open(path));
}

}  // namespace muster::inspect
