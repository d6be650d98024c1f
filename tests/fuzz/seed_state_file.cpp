// SPDX-License-Identifier: Apache-2.0
// Writes the seeds of corpus/user_block, corpus/catalogue and corpus/chunk anew, after a change of the format:
//   seed_state_file CORPUS-FOLDER

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "src/core/checksum.hpp"
#include "src/statefile/chunk_codec.hpp"
#include "src/statefile/format.hpp"

namespace {

using namespace muster;
using namespace muster::statefile;

std::filesystem::path folder;

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void put(const std::string& target, const std::string& name, const std::string& bytes) {
  std::filesystem::create_directories(folder / target);
  std::ofstream(folder / target / name, std::ios::binary) << bytes;
}

std::string number(std::uint64_t value) {
  return text_of(std::as_bytes(std::span(&value, 1)));
}

void user_blocks() {
  UserBlock block{.info = {.generation = 3, .rank = 1, .world_size = 4},
                  .file_bytes = 100'000,
                  .tensors = 2,
                  .catalogue = {90'000, 300},
                  .catalogue_checksum = 5,
                  .config = {80'000, 20},
                  .config_checksum = 6,
                  .metadata_checksum = 7};
  const std::string superblock(superblock_bytes, 's');
  block.superblock_checksum = tensor_checksum(std::as_bytes(std::span(superblock)));
  const auto seed = [&](const char* name, const UserBlock& what, std::uint64_t file_bytes) {
    put("user_block", name, '\1' + number(file_bytes) + text_of(encode_user_block(what)).substr(0, 136) + superblock);
  };
  seed("right", block, 100'000);
  seed("short", block, 99'999);
  seed("long", block, 100'001);
  UserBlock other = block;
  other.version = 2;
  seed("newer", other, 100'000);
  other = block;
  other.info.rank = 4;
  seed("rank", other, 100'000);
  other = block;
  other.catalogue.offset = ~std::uint64_t{0} - 10;
  seed("outside", other, 100'000);
  other = block;
  other.config.bytes = 20'001;
  seed("config_outside", other, 100'000);
  const std::string whole = text_of(encode_user_block(block)) + superblock;
  put("user_block", "file", '\0' + whole);
  put("user_block", "file_cut", '\0' + whole.substr(0, 4000));
  put("user_block", "zeros", std::string(300, '\0'));
}

void catalogues() {
  Catalogue catalogue;
  const auto seed = [&](const char* name) { put("catalogue", name, '\0' + text_of(encode_catalogue(catalogue))); };
  seed("empty");
  catalogue.tensors = {
      {.name = "plain", .dtype = DType::f32, .shape = {10, 10}, .bytes = 400, .stored_bytes = 400, .offset = 8192},
      {.name = "none", .dtype = DType::u8, .shape = {0, 5}},
      {.name = "scalar", .dtype = DType::i64, .shape = {}, .bytes = 8, .stored_bytes = 8, .offset = 9216}};
  catalogue.chunking.resize(3);
  seed("plain");
  catalogue.tensors.push_back({.name = "chunked",
                               .dtype = DType::bf16,
                               .shape = {100, 10},
                               .bytes = 2000,
                               .stored_bytes = 1300,
                               .compressed = true});
  catalogue.tensors.push_back({.name = "packed",
                               .dtype = DType::u4,
                               .shape = {41, 100},
                               .bytes = 2050,
                               .stored_bytes = 200,
                               .compressed = true});
  catalogue.chunking.push_back({60, 0, 0});
  catalogue.chunking.push_back({2000, 2, 0});
  catalogue.chunks = {{20'000, 100, 0, 1}, {20'100, 1200, 3, 2}, {30'000, 150, 0, 3}, {30'150, 50, 0, 4}};
  seed("chunked");
  catalogue.tensors[1].name = "plain";
  seed("twice");
  catalogue.tensors[0].offset = 19'968;
  seed("overlapping");
  catalogue.tensors[0].offset = 1 << 20;
  seed("outside");
  catalogue.tensors[0].shape = {std::int64_t{1} << 60, std::int64_t{1} << 60};
  seed("overflow");
}

void chunks() {
  ChunkEncoder encoder(1);
  for (const unsigned shift : {0U, 1U, 2U, 3U}) {
    const std::size_t item = std::size_t{1} << shift;
    std::vector<std::byte> elements(200 * item);
    for (std::size_t i = 0; i < elements.size(); ++i) elements[i] = static_cast<std::byte>(i % item == 0 ? i : 1);
    const std::string head = {static_cast<char>(shift), static_cast<char>(200), 0, 77, 0};
    const ChunkEncoder::Encoded encoded = encoder.encode(elements, elements.size(), item);
    const std::string bytes = text_of(encoded.bytes);
    put("chunk", "item_" + std::to_string(item), head + bytes);
    put("chunk", "cut_" + std::to_string(item), head + bytes.substr(0, bytes.size() - 1));
    put("chunk", "more_" + std::to_string(item), head + bytes + bytes);
    const std::string raw = {static_cast<char>(shift | 4U), static_cast<char>(200), 0, 77, 0};
    put("chunk", "raw_" + std::to_string(item), raw + text_of(elements));
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) {
    std::fprintf(stderr, "usage: %s CORPUS-FOLDER\n", arguments[0]);
    return 2;
  }
  folder = arguments[1];
  user_blocks();
  catalogues();
  chunks();
  return 0;
}
