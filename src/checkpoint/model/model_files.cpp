// SPDX-License-Identifier: Apache-2.0
// Names of a checkpoint's files, the distribution of tensors over files, and the files next to them.

#include "src/checkpoint/model/model_files.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <memory>
#include <system_error>

#include "muster/config.hpp"
#include "muster/error.hpp"
#include "muster/model_dir.hpp"
#include "muster/plan.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/model/output_directory.hpp"
#include "src/formats/json_text.hpp"
#include "src/os/file.hpp"
#include "src/os/publish.hpp"
#include "src/workspace/names.hpp"

namespace muster {
namespace {

namespace fs = std::filesystem;

// The names before ".safetensors" that transformers, diffusers and PEFT look for.
constexpr std::array<std::string_view, 3> model_stems = {"model", "diffusion_pytorch_model", "adapter_model"};
constexpr int deepest_folder = 32;
constexpr std::size_t largest_config = std::size_t{64} << 20;
constexpr std::size_t copy_piece = std::size_t{8} << 20;

[[noreturn]] void throw_unreadable(const std::string& directory, const std::error_code& error) {
  const bool is_missing = error == std::errc::no_such_file_or_directory || error == std::errc::not_a_directory;
  throw file_error(is_missing ? ErrorKind::not_found : ErrorKind::io, "reading the directory", directory,
                   error == std::errc::no_such_file_or_directory ? "does not exist" : error.message(), error.value());
}

/// One level of a directory, sorted.
std::vector<fs::directory_entry> entries_of(const std::string& directory) {
  std::error_code error;
  std::vector<fs::directory_entry> entries;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error)) {
    if (!os::is_partial_name(entry->path().filename().string())) entries.push_back(*entry);
  }
  if (error) throw_unreadable(directory, error);
  std::sort(entries.begin(), entries.end(),
            [](const auto& a, const auto& b) { return a.path().native() < b.path().native(); });
  return entries;
}

constexpr std::array<std::string_view, 19> endings_of_other_weights = {
    ".bin",       ".pt",     ".pth", ".ckpt", ".gguf",    ".ggml",      ".h5",     ".hdf5", ".msgpack", ".onnx",
    ".onnx_data", ".tflite", ".ot",  ".npz",  ".mlmodel", ".mlpackage", ".engine", ".nemo", ".pdparams"};
constexpr std::array<std::string_view, 27> names_beside_weights = {"config.json",
                                                                   "generation_config.json",
                                                                   "tokenizer.json",
                                                                   "tokenizer_config.json",
                                                                   "tokenizer.model",
                                                                   "special_tokens_map.json",
                                                                   "added_tokens.json",
                                                                   "vocab.json",
                                                                   "vocab.txt",
                                                                   "merges.txt",
                                                                   "spiece.model",
                                                                   "sentencepiece.bpe.model",
                                                                   "chat_template.json",
                                                                   "chat_template.jinja",
                                                                   "preprocessor_config.json",
                                                                   "processor_config.json",
                                                                   "video_preprocessor_config.json",
                                                                   "modules.json",
                                                                   "sentence_bert_config.json",
                                                                   "config_sentence_transformers.json",
                                                                   "README.md",
                                                                   "LICENSE",
                                                                   "LICENSE.txt",
                                                                   "NOTICE",
                                                                   "NOTICE.txt",
                                                                   "USE_POLICY.md",
                                                                   ".gitattributes"};

bool is_other_weights(std::string_view name) {
  constexpr std::string_view index = ".index.json";
  if (name.ends_with(index)) name.remove_suffix(index.size());
  const std::size_t dot = name.rfind('.');
  return dot != std::string_view::npos &&
         std::ranges::find(endings_of_other_weights, name.substr(dot)) != endings_of_other_weights.end();
}

/// One walk through a directory.
class Carrying {
 public:
  Carrying(const std::string& directory, const std::string& carry) : carry_(carry) {
    for (std::size_t at = 0; at <= carry.size();) {
      // Commas in braces belong to the glob.
      std::size_t end = at;
      for (int braces = 0; end < carry.size() && (carry[end] != ',' || braces > 0); ++end)
        braces += carry[end] == '{' ? 1 : carry[end] == '}' ? -1 : 0;
      globs_.push_back(TensorPattern::glob(carry.substr(at, end - at)));
      at = end + 1;
    }
    std::error_code error;
    inside_.push_back(fs::canonical(directory, error));
    if (error) throw_unreadable(directory, error);
    // In Hugging Face's cache, the files of snapshots/COMMIT/ are links to blobs/.
    if (inside_[0].parent_path().filename() == "snapshots")
      inside_.push_back(inside_[0].parent_path().parent_path() / "blobs");
    read_modules(directory);
    walk(directory, "", 0);
    std::ranges::sort(found_.names);
    std::ranges::sort(found_.skipped, {}, &Omission::name);
  }

  ExtraFiles found() && { return std::move(found_); }

 private:
  /// Reads the folders of a model of sentence-transformers, each of which has weights of its own; modules.json names
  /// them.
  void read_modules(const std::string& directory) {
    constexpr std::uint64_t longest_modules = 1 << 20;
    const std::string path = join_path(directory, "modules.json");
    std::error_code error;
    if (!fs::is_regular_file(path, error)) return;
    const std::string text = read_text(path, longest_modules);
    try {
      const Config modules = core::parse_tolerantly(text);
      for (const Config& module : modules.as_array())
        if (const Config* folder = module.find("path"); folder != nullptr && !folder->as_string().empty())
          modules_.push_back(fs::path(folder->as_string() + "/").lexically_normal().string());
    } catch (const Error&) {
      modules_.clear();  // not a list of modules: weights in folders are then left out and reported
    }
  }

  [[nodiscard]] bool is_in_module(const std::string& below) const {
    return std::ranges::any_of(modules_, [&](const std::string& module) { return below.starts_with(module); });
  }

  /// Whether a folder has weights and therefore is another model, such as an earlier checkpoint of a training.
  [[nodiscard]] bool is_other_model(const std::string& directory, const std::string& below) const {
    if (below.empty() || !carry_.empty() || is_in_module(below)) return false;
    return std::ranges::any_of(entries_of(directory), [](const fs::directory_entry& entry) {
      const std::string name = entry.path().filename().string();
      return is_weight_name(name) || is_index_name(name) || is_other_weights(name);
    });
  }

  void walk(const std::string& directory, const std::string& below, int depth) {
    if (depth > deepest_folder)
      throw file_error(ErrorKind::invalid_argument, "reading the directory", directory,
                       fmt::format("the folders are more than {} levels deep", deepest_folder));
    const bool is_other = is_other_model(directory, below);
    for (const fs::directory_entry& entry : entries_of(directory)) {
      const std::string name = entry.path().filename().string();
      std::error_code error;
      // The workspace's own files do not belong to any model.
      if (depth == 0 && workspace::parse_name(name)) continue;
      if (entry.is_directory(error) && !entry.is_symlink(error)) {
        // Internal folders of Git, Hugging Face, and programs that pull weights.
        if (name != ".git" && name != ".cache" && name != sync_folder)
          walk(entry.path().string(), below + name + "/", depth + 1);
        continue;
      }
      // Checksums are only valid for the weights next to them.
      if (depth == 0 &&
          (is_weight_name(name) || is_index_name(name) || name == checksums_file_name || name == written_files_name))
        continue;
      if (!is_wanted(below + name)) continue;
      std::string reason = reason_against(entry, below + name);
      if (reason.empty() && is_other)
        reason = is_weight_name(name) || is_index_name(name) ? "weights of another model, in a folder"
                                                             : "in a folder with weights of another model";
      if (reason.empty())
        found_.names.push_back(below + name);
      else
        found_.skipped.push_back({below + name, std::move(reason)});
    }
  }

  [[nodiscard]] std::string reason_against(const fs::directory_entry& entry, const std::string& name) const {
    std::error_code error;
    if (entry.is_directory(error)) return "a link to a folder";
    if (!entry.is_regular_file(error))
      return entry.is_symlink(error) ? "a link to a path that does not exist" : "not a file";
    if (!carry_.empty()) return {};
    if (is_other_weights(name) && !is_in_module(name)) return "weights of another format";
    if (!entry.is_symlink(error)) return {};
    const fs::path target = fs::canonical(entry.path(), error);
    if (!error && std::ranges::any_of(inside_, [&](const fs::path& path) { return is_inside(target, path); }))
      return {};
    return fmt::format("a link to {}, outside the directory", in_quotes(target.string()));
  }

  [[nodiscard]] bool is_wanted(std::string_view name) const {
    if (carry_.empty() || carry_ == "all") return true;
    if (carry_ == "none") return false;
    return std::ranges::any_of(globs_, [&](const TensorPattern& glob) { return glob.matches(name); });
  }

  const std::string& carry_;
  std::vector<TensorPattern> globs_;
  std::vector<fs::path> inside_;
  std::vector<std::string> modules_;  // with a trailing slash
  ExtraFiles found_;
};

/// Assigns tensors to files of at most `limit` bytes; a larger tensor has a file of its own. Returns the tensors of
/// each file.
std::vector<std::vector<std::size_t>> fill_files(std::span<const std::uint64_t> sizes, std::uint64_t limit) {
  std::vector<std::vector<std::size_t>> files(1);
  std::uint64_t in_file = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (in_file != 0 && (sizes[i] > limit || in_file > limit - sizes[i])) {
      files.emplace_back();
      in_file = 0;
    }
    files.back().push_back(i);
    in_file += sizes[i];
  }
  return files;
}

}  // namespace

std::string numbered_name(std::string_view prefix, std::uint64_t number, std::uint64_t count) {
  return fmt::format("{}-{:05}-of-{:05}.safetensors", prefix, number, count);
}

std::string NumberedName::with(std::uint64_t other) const {
  return fmt::format("{}-{:0{}}-of-{}{}", prefix, other, digits, total, ending);
}

std::optional<NumberedName> parse_numbered_name(std::string_view name) {
  constexpr std::string_view between = "-of-";
  constexpr std::size_t most_digits = 9;
  const std::size_t middle = name.rfind(between);
  if (middle == std::string_view::npos) return std::nullopt;
  const std::string_view before = name.substr(0, middle);
  const std::size_t dash = before.rfind('-');
  if (dash == std::string_view::npos) return std::nullopt;
  const std::string_view behind = name.substr(middle + between.size());
  const std::string_view number = before.substr(dash + 1);
  const std::string_view total = behind.substr(0, behind.find('.'));
  if (total.size() == behind.size()) return std::nullopt;
  NumberedName parsed{.prefix = std::string(before.substr(0, dash)),
                      .ending = std::string(behind.substr(total.size())),
                      .digits = number.size(),
                      .total = std::string(total)};
  for (const auto& [digits, value] : {std::pair(number, &parsed.number), std::pair(total, &parsed.count)}) {
    if (digits.empty() || digits.size() > most_digits || digits.find_first_not_of("0123456789") != digits.npos)
      return std::nullopt;
    std::from_chars(digits.data(), digits.data() + digits.size(), *value);
  }
  return parsed;
}

std::string shard_file_name(int rank, int ranks) {
  return numbered_name(shard_prefix, static_cast<std::uint64_t>(rank), static_cast<std::uint64_t>(ranks));
}

std::optional<ShardName> parse_shard_file_name(std::string_view name) {
  const std::optional<NumberedName> parsed = parse_numbered_name(name);
  if (!parsed || parsed->number >= parsed->count || name != numbered_name(shard_prefix, parsed->number, parsed->count))
    return std::nullopt;
  return ShardName{static_cast<int>(parsed->number), static_cast<int>(parsed->count)};
}

bool is_weight_name(std::string_view name) noexcept {
  return name.ends_with(".safetensors");
}

bool is_index_name(std::string_view name) noexcept {
  // The index of a variant: "model.safetensors.index.fp16.json".
  return name.find(".safetensors.index.") != std::string_view::npos && name.ends_with(".json");
}

Belongs belongs_to_checkpoint(std::string_view name) {
  const std::optional<NumberedName> numbered = parse_numbered_name(name);
  const std::string_view stem = numbered ? std::string_view(numbered->prefix) : name.substr(0, name.find('.'));
  const std::string_view ending = name.substr(std::min(name.size(), name.find('.')));
  const bool is_whole = !numbered && (ending == ".safetensors" || ending == ".safetensors.index.json");
  if ((std::ranges::find(model_stems, stem) != model_stems.end() &&
       (is_whole || (numbered && numbered->ending == ".safetensors"))) ||
      parse_shard_file_name(name))
    return Belongs::weights;
  const bool is_known = name == checksums_file_name || is_journal_name(name) || os::is_partial_name(name) ||
                        std::ranges::find(names_beside_weights, name) != names_beside_weights.end();
  return is_known ? Belongs::beside : Belongs::no;
}

bool is_name_beside(std::string_view name) noexcept {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

bool is_inside(const fs::path& path, const fs::path& directory) {
  std::error_code error;
  const fs::path inside = fs::weakly_canonical(path, error).lexically_relative(fs::weakly_canonical(directory, error));
  return !error && !inside.empty() && *inside.begin() != "..";
}

std::string join_path(const std::string& directory, const std::string& name) {
  return (fs::path(directory) / name).string();
}

std::string read_text(const std::string& path, std::uint64_t most) {
  const std::vector<std::byte> bytes = os::read_small_file(path, most);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

DirectoryNames names_in(const std::string& directory) {
  DirectoryNames names;
  for (const fs::directory_entry& entry : entries_of(directory)) {
    std::error_code error;
    // A dangling link is included, so that opening it reports the error.
    (entry.is_directory(error) ? names.folders : names.files).push_back(entry.path().filename().string());
  }
  return names;
}

std::vector<std::string> files_in(const std::string& directory) {
  return names_in(directory).files;
}

std::string_view model_stem(const std::string& directory) {
  const std::optional<Config> config = read_model_config(directory);
  if (config && config->find("_diffusers_version") != nullptr) return model_stems[1];
  std::error_code error;
  const bool is_adapter = !config && fs::exists(join_path(directory, "adapter_config.json"), error);
  return is_adapter ? model_stems[2] : model_stems[0];
}

FileLayout split_into_files(std::span<const TensorEntry> entries, std::uint64_t max_shard_size, std::string_view stem) {
  std::vector<std::uint64_t> sizes;
  std::uint64_t total = 0;
  for (const TensorEntry& entry : entries) {
    sizes.push_back(byte_size(entry.dtype, entry.shape));
    total += sizes.back();
  }
  // The limit determines the number of files. They are then made as equal as possible: the limit is lowered to the
  // smallest size that needs no further file.
  const std::size_t count = fill_files(sizes, max_shard_size).size();
  std::uint64_t low = 0;
  std::uint64_t high = std::min(max_shard_size, total);
  while (low < high) {
    const std::uint64_t middle = low + (high - low) / 2;
    if (fill_files(sizes, middle).size() <= count)
      high = middle;
    else
      low = middle + 1;
  }
  FileLayout layout;
  for (std::vector<std::size_t>& tensors : fill_files(sizes, high)) layout.files.push_back({{}, std::move(tensors)});
  for (std::size_t i = 0; i < layout.files.size(); ++i)
    layout.files[i].name = layout.files.size() == 1 ? fmt::format("{}.safetensors", stem)
                                                    : numbered_name(stem, i + 1, layout.files.size());
  // Sorted by name, as Hugging Face's libraries write it.
  std::map<std::string_view, const std::string*> weights;
  for (const CheckpointFile& file : layout.files) {
    for (const std::size_t i : file.tensors) {
      if (!weights.emplace(entries[i].name, &file.name).second)
        throw Error(ErrorKind::invalid_argument,
                    fmt::format("planning the files of a model: tensor {}: the name is duplicated",
                                in_quotes(entries[i].name)));
    }
  }
  if (layout.files.size() == 1) return layout;
  ConfigObject map;
  map.reserve(weights.size());
  for (const auto& [name, file] : weights) map.insert(std::string(name), Config(*file));
  layout.index = to_json(Config::object({{"metadata", Config::object({{"total_size", Config(total)}})},
                                         {"weight_map", Config(std::move(map))}}),
                         2) +
                 "\n";
  return layout;
}

std::optional<std::string> read_model_config_text(const std::string& directory) {
  const std::string path = join_path(directory, "config.json");
  std::error_code error;
  if (!fs::exists(path, error)) return std::nullopt;
  return read_text(path, largest_config);
}

std::optional<Config> read_model_config(const std::string& directory) {
  const std::optional<std::string> text = read_model_config_text(directory);
  if (!text) return std::nullopt;
  return with_file("reading", join_path(directory, "config.json"), [&] {
    Config config = core::parse_tolerantly(*text);
    if (!config.is_object()) throw Error(ErrorKind::corrupt, "not a JSON object");
    return std::optional(std::move(config));
  });
}

ExtraFiles extra_files_of(const std::string& directory, const std::string& carry) {
  std::error_code error;
  if (fs::is_regular_file(directory, error)) return {};
  return Carrying(directory, carry).found();
}

void copy_extra_files(const std::string& from, const std::string& to, std::span<const std::string> names,
                      const std::function<void()>& between) {
  const auto buffer = std::make_unique_for_overwrite<std::byte[]>(copy_piece);
  for (const std::string& name : names) {
    const os::ReadableFile source = os::ReadableFile::open(join_path(from, name));
    const std::string target = join_path(to, name);
    if (name.find('/') != std::string::npos) {
      std::error_code error;
      fs::create_directories(fs::path(target).parent_path(), error);
      if (error) throw os::errno_error("making the parent directory", error.value(), target);
    }
    os::PublishedFile copy(target);
    copy.reserve(source.bytes());
    for (std::uint64_t at = 0; at < source.bytes(); at += copy_piece) {
      const std::span<std::byte> piece(buffer.get(), std::min<std::uint64_t>(copy_piece, source.bytes() - at));
      source.read_at(at, piece);
      copy.write_at(at, piece);
      copy.start_writeback(at, piece.size());
      if (between) between();
    }
    copy.commit();
  }
}

void write_file(const std::string& path, std::string_view text) {
  os::PublishedFile file(path);
  file.write_at(0, std::as_bytes(std::span(text)));
  file.commit();
}

}  // namespace muster
