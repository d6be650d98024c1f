// SPDX-License-Identifier: Apache-2.0
// Commits a state file: steps 3 to 6 of writer_state.hpp.

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <string>

#include "muster/error.hpp"
#include "muster/version.hpp"
#include "src/base/escaped.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/core/thread_pool.hpp"
#include "src/os/file.hpp"
#include "src/os/library.hpp"
#include "src/os/process.hpp"
#include "src/statefile/writer_state.hpp"

namespace muster::statefile {

namespace {

hdf5::MakeMetadata loaded_maker() {
  const std::string name = fmt::format("libmuster-hdf5.so.{}", version());
  os::LoadedLibrary library = os::load_library(name);
  if (library.handle != nullptr) {
    if (void* symbol = os::find_symbol(library, hdf5::make_metadata_symbol); symbol != nullptr)
      return reinterpret_cast<hdf5::MakeMetadata>(symbol);
    library.failure = fmt::format("{} is a different library", library.file);
  }
  throw Error(ErrorKind::unsupported,
              fmt::format("writing a state file: {0} or the libhdf5 that it was built with cannot be loaded ({2}). "
                          "Install both, and {0} next to libmuster ({1}). Reading needs neither",
                          name, in_quotes(library.file), library.failure),
              {.path = library.file});
}

hdf5::MakeMetadata library() {
  static ForkMutex mutex;
  static hdf5::MakeMetadata function = nullptr;
  const std::lock_guard lock(mutex);
  // Retried after a failure, because the library may have been installed in the meantime.
  if (function == nullptr) function = loaded_maker();
  return function;
}

}  // namespace

void require_hdf5() {
  library();
}

hdf5::Metadata make_metadata(const hdf5::MetadataPlan& plan) {
  hdf5::Metadata metadata;
  // libhdf5 may be built without thread safety.
  static ForkMutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  if (!library()(plan, metadata))
    throw Error(ErrorKind::io, fmt::format("making the HDF5 structures of a state file: {}", metadata.failure));
  return metadata;
}

std::string link_name(std::string_view name) {
  const bool is_dots = name == "." || name == "..";
  std::string link;
  link.reserve(name.size());
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    if (is_dots || c == '/' || c == '%' || byte < 0x20 || byte == 0x7f) {
      fmt::format_to(std::back_inserter(link), "%{:02X}", byte);
    } else {
      link.push_back(c);
    }
  }
  return link;
}

namespace {

constexpr std::uint64_t summed_piece = std::uint64_t{4} << 20;
constexpr std::uint64_t tail_alignment = 8;

std::uint64_t aligned(std::uint64_t offset) noexcept {
  return (offset + tail_alignment - 1) / tail_alignment * tail_alignment;
}

class Committing {
 public:
  explicit Committing(WriterState& state) : state_(state), catalogue_(state.catalogue) {}

  void commit() {
    check_complete();
    sum_the_rest();
    fill_catalogue();
    place_tail();
    make_structures();
    write_around_data();
    if (state_.options.durable) state_.file.sync_data();
    state_.file.write_at(0, encode_user_block(block_));
    state_.file.commit(state_.options.durable ? os::Durability::synced : os::Durability::unsynced);
  }

 private:
  void check_complete() const {
    for (std::size_t i = 0; i < catalogue_.tensors.size(); ++i) {
      const std::uint64_t written = state_.targets[i].written();
      if (written != catalogue_.tensors[i].bytes)
        state_.refuse(catalogue_.tensors[i],
                      fmt::format("{} of its {} bytes were written", written, catalogue_.tensors[i].bytes));
    }
  }

  // Reads back the bytes that did not arrive in order.
  void sum_the_rest() {
    std::vector<std::size_t> rest;
    for (std::size_t i = 0; i < catalogue_.tensors.size(); ++i)
      if (state_.targets[i].summed() != catalogue_.tensors[i].bytes) rest.push_back(i);
    if (rest.empty()) return;
    const os::ReadableFile file = os::ReadableFile::open(state_.temporary);
    parallel_for(rest.size(), static_cast<std::size_t>(os::usable_cores()), [&](std::size_t place, std::size_t) {
      const std::size_t i = rest[place];
      const std::uint64_t bytes = catalogue_.tensors[i].bytes;
      std::vector<std::byte> buffer;
      for (std::uint64_t at = state_.targets[i].summed(); at < bytes; at += buffer.size()) {
        buffer.resize(std::min(summed_piece, bytes - at));
        read_elements(file, catalogue_, i, at, buffer, 1);
        state_.targets[i].add_to_checksum(at, buffer, bytes);
      }
    });
  }

  void fill_catalogue() {
    for (std::size_t i = 0; i < catalogue_.tensors.size(); ++i) {
      StateTensor& tensor = catalogue_.tensors[i];
      tensor.checksum = state_.targets[i].checksum();
      if (!tensor.compressed) continue;
      tensor.stored_bytes = 0;
      for (const StoredChunk& chunk : chunks_of(i)) tensor.stored_bytes += chunk.bytes;
    }
  }

  [[nodiscard]] std::span<const StoredChunk> chunks_of(std::size_t index) const {
    return std::span(catalogue_.chunks).subspan(catalogue_.chunking[index].first_chunk, state_.grid(index).count());
  }

  void place_tail() {
    data_end_ = state_.data_end.load();
    block_ = {.info = state_.options.info,
              .tensors = catalogue_.tensors.size(),
              .config = {aligned(data_end_), state_.config_text.size()}};
    block_.catalogue = {aligned(block_.config.end()), catalogue_bytes(catalogue_.tensors, catalogue_.chunks.size())};
  }

  void make_structures() {
    std::vector<hdf5::Dataset> datasets;
    datasets.reserve(catalogue_.tensors.size());
    for (std::size_t i = 0; i < catalogue_.tensors.size(); ++i) {
      const StateTensor& tensor = catalogue_.tensors[i];
      hdf5::Dataset& dataset = datasets.emplace_back();
      dataset = {.link_name = link_name(tensor.name),
                 .dtype = tensor.dtype,
                 .dtype_name = to_string(tensor.dtype),
                 .shape = tensor.shape,
                 .bytes = tensor.bytes,
                 .offset = tensor.offset};
      if (!tensor.compressed) continue;
      dataset.chunk_shape = state_.grid(i).chunk_shape();
      dataset.chunks = chunks_of(i);
    }
    const hdf5::MetadataPlan plan = {.user_block_bytes = user_block_bytes,
                                     .config_offset = block_.config.offset,
                                     .config_bytes = block_.config.bytes,
                                     .catalogue_offset = block_.catalogue.offset,
                                     .catalogue_bytes = block_.catalogue.bytes,
                                     .metadata_offset = aligned(block_.catalogue.end()),
                                     .zstd_level = state_.options.zstd_level.value_or(1),
                                     .facts = {{"muster_format", format_version},
                                               {"rank", static_cast<std::uint64_t>(block_.info.rank)},
                                               {"world_size", static_cast<std::uint64_t>(block_.info.world_size)},
                                               {"generation", block_.info.step}},
                                     .datasets = datasets};
    structures_ = with_file("writing the state file", state_.file.path(), [&] { return make_metadata(plan); });
    structures_offset_ = plan.metadata_offset;
    block_.file_bytes = structures_offset_ + structures_.structures.size();
  }

  void write_around_data() {
    const std::vector<std::byte> catalogue = encode_catalogue(catalogue_);
    // Everything after the data is written in one piece; alignment gaps are zeros.
    std::vector<std::byte> tail(block_.file_bytes - data_end_);
    const auto put = [&](std::uint64_t offset, std::span<const std::byte> bytes) {
      std::ranges::copy(bytes, tail.begin() + static_cast<std::ptrdiff_t>(offset - data_end_));
    };
    put(block_.config.offset, std::as_bytes(std::span(state_.config_text)));
    put(block_.catalogue.offset, catalogue);
    put(structures_offset_, structures_.structures);
    block_.config_checksum = tensor_checksum(std::as_bytes(std::span(state_.config_text)));
    block_.catalogue_checksum = tensor_checksum(catalogue);
    block_.superblock_checksum = tensor_checksum(structures_.superblock);
    block_.metadata_checksum = metadata_checksum(tail);
    state_.file.write_at(data_end_, tail);
    state_.file.write_at(user_block_bytes, structures_.superblock);
  }

  // Covers every byte after the block that does not belong to a tensor. Gaps between tensors are holes, which read as
  // zeros.
  [[nodiscard]] std::uint64_t metadata_checksum(std::span<const std::byte> tail) const {
    static constexpr std::array<std::byte, page_alignment> zeros{};
    TensorChecksum sum;
    sum.add(structures_.superblock);
    std::uint64_t end = head_bytes;
    for (const Extent& stored : stored_extents(catalogue_)) {
      sum.add(std::span(zeros).first(stored.offset - end));
      end = stored.end();
    }
    sum.add(tail);
    return sum.value();
  }

  WriterState& state_;
  Catalogue& catalogue_;
  std::uint64_t data_end_ = 0;
  UserBlock block_;
  hdf5::Metadata structures_;
  std::uint64_t structures_offset_ = 0;
};

}  // namespace

void WriterState::commit() {
  require_writing();
  change([&] { Committing(*this).commit(); });
  is_committed = true;
}

}  // namespace muster::statefile
