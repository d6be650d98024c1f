// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/convert.hpp"

#include <fmt/core.h>

#include <charconv>
#include <chrono>
#include <filesystem>

#include "muster/error.hpp"
#include "muster/safetensors.hpp"
#include "muster/state_file.hpp"
#include "src/checkpoint/shard_metadata.hpp"
#include "src/core/progress_counter.hpp"
#include "src/core/quoted.hpp"
#include "src/inspect/source.hpp"
#include "src/os/publish.hpp"

namespace muster::inspect {
namespace {

Config config_of(const Source& source) {
  return source.kind == "state" ? *source.config() : config_from_metadata(source.metadata);
}

void write_safetensors(const Source& source, const std::string& out, ProgressCounter& progress) {
  SafetensorsWriter writer(out, source.entries(), metadata_from_config(config_of(source)));
  for_each_piece(*source.tensors, false, progress,
                 [&](std::size_t tensor, std::uint64_t offset, std::span<const std::byte> bytes) {
                   writer.write(source.entries()[tensor].name, offset, bytes);
                 });
  writer.commit();
}

void write_state(const Source& source, const std::string& out, const ConvertOptions& options,
                 ProgressCounter& progress) {
  StateFileOptions state{.zstd_level = options.zstd_level};
  if (source.kind == "state") state.info = source.states.front().info();
  write_state_file(*source.tensors, out, config_of(source), state, progress);
}

void check_paths(const std::string& in, const std::string& out, const ConvertOptions& options) {
  const auto refuse = [&](const std::string& words) {
    throw Error(ErrorKind::argument, fmt::format("converting {} to {}: {}", in_quotes(in), in_quotes(out), words),
                {.path = out});
  };
  std::error_code error;
  if (std::filesystem::is_directory(in, error))
    refuse("it is a directory, and one file becomes one file; muster export and muster shard work on directories");
  if (std::filesystem::equivalent(in, out, error)) refuse("they are the same file");
  const auto status = std::filesystem::symlink_status(out, error);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
    refuse("the second is there and is not a file, which is not replaced; name another one");
  if (std::filesystem::exists(status) && !options.force) refuse("the second is there already; --force replaces it");
}

bool is_state_name(const std::string& path) {
  if (path.ends_with(".h5") || path.ends_with(".hdf5")) return true;
  if (path.ends_with(".safetensors")) return false;
  throw Error(
      ErrorKind::argument,
      fmt::format("{} does not end with .safetensors, .h5 or .hdf5, by which the format is chosen", in_quotes(path)),
      {.path = path});
}

}  // namespace

std::optional<int> parse_compression(const std::string& text) {
  if (text == "none") return std::nullopt;
  if (text == "zstd") return 1;
  constexpr std::string_view prefix = "zstd:";
  int level = 0;
  const char* const end = text.data() + text.size();
  if (text.starts_with(prefix)) {
    const auto [parsed, error] = std::from_chars(text.data() + prefix.size(), end, level);
    constexpr int highest = 22;
    if (error == std::errc() && parsed == end && level >= 1 && level <= highest) return level;
  }
  throw Error(ErrorKind::argument,
              fmt::format("the compression {} is none of none, zstd and zstd:1 to zstd:22", in_quotes(text)));
}

ConvertReport convert(const std::string& in, const std::string& out, const ConvertOptions& options) {
  const bool is_state = is_state_name(out);
  if (!is_state && options.zstd_level)
    throw Error(ErrorKind::argument, "safetensors files are not compressed; a state file (.h5) can be");
  check_paths(in, out, options);
  const Source source = open_source(in);
  ConvertReport report;
  for (const TensorEntry& entry : source.entries()) {
    ++report.tensors;
    report.bytes += entry.bytes;
  }
  const auto begin = std::chrono::steady_clock::now();
  os::remove_dead_partials(out);
  ProgressCounter progress(options.progress, report.bytes, options.stop);
  if (is_state)
    write_state(source, out, options, progress);
  else
    write_safetensors(source, out, progress);
  std::error_code error;
  report.stored_bytes = std::filesystem::file_size(out, error);
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return report;
}

}  // namespace muster::inspect
