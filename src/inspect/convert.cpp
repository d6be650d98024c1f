// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/convert.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <filesystem>

#include "muster/error.hpp"
#include "muster/safetensors.hpp"
#include "muster/state.hpp"
#include "muster/state_file.hpp"
#include "src/checkpoint/shard_files.hpp"
#include "src/core/parallel.hpp"
#include "src/core/progress_counter.hpp"
#include "src/core/quoted.hpp"
#include "src/inspect/source.hpp"
#include "src/os/publish.hpp"

namespace muster::inspect {
namespace {

constexpr std::uint64_t piece_bytes = std::uint64_t{8} << 20;

struct Piece {
  std::size_t tensor = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

/// Calls write(tensor, offset, bytes) for all bytes of all tensors. `in_order`: those of one tensor one after the
/// other, by one thread; else any piece at any time.
template <class Write>
void for_each_piece(const Source& source, bool in_order, ProgressCounter& progress, Write&& write) {
  const std::vector<TensorEntry>& tensors = source.entries();
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::uint64_t most = in_order ? tensors[i].bytes : piece_bytes;
    for (std::uint64_t at = 0; at < tensors[i].bytes; at += most)
      pieces.push_back({i, at, std::min(most, tensors[i].bytes - at)});
  }
  // The largest first, so that none of them is left to one thread at the end.
  if (in_order)
    std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.bytes > b.bytes; });
  std::vector<std::vector<std::byte>> memory(copy_workers());
  parallel_for(pieces.size(), memory.size(), [&](std::size_t index, std::size_t worker) {
    const Piece& piece = pieces[index];
    for (std::uint64_t at = piece.offset; at < piece.offset + piece.bytes; at += piece_bytes) {
      const std::uint64_t length = std::min(piece_bytes, piece.offset + piece.bytes - at);
      write(piece.tensor, at, source.tensors->read_piece(piece.tensor, at, length, memory[worker]));
      progress.add(length);
    }
  });
}

Config config_of(const Source& source) {
  return source.kind == "state" ? *source.config() : config_from_metadata(source.metadata);
}

void write_safetensors(const Source& source, const std::string& out, ProgressCounter& progress) {
  SafetensorsWriter writer(out, source.entries(), metadata_from_config(config_of(source)));
  for_each_piece(source, false, progress,
                 [&](std::size_t tensor, std::uint64_t offset, std::span<const std::byte> bytes) {
                   writer.write(source.entries()[tensor].name, offset, bytes);
                 });
  writer.commit();
}

void write_state(const Source& source, const std::string& out, const ConvertOptions& options,
                 ProgressCounter& progress) {
  std::vector<StateFileWriter::Entry> entries;
  for (const TensorEntry& entry : source.entries()) entries.push_back({entry.name, entry.dtype, entry.shape});
  StateFileOptions state;
  state.zstd_level = options.zstd_level;
  if (source.kind == "state") state.info = source.states.front().info();
  StateFileWriter writer(out, config_of(source), std::move(entries), state);
  // Pieces that do not end with a chunk must come in their order.
  for_each_piece(source, options.zstd_level.has_value(), progress,
                 [&](std::size_t tensor, std::uint64_t offset, std::span<const std::byte> bytes) {
                   writer.write(tensor, offset, bytes);
                 });
  writer.commit();
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
