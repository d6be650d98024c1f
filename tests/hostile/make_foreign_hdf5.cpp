// SPDX-License-Identifier: Apache-2.0
// Makes HDF5 files with libhdf5, in a separate process, so that the process that opens them has never loaded libhdf5.
//   make_foreign_hdf5 gallery FOLDER   files that attack their reader (foreign_hdf5_test.cpp lists the defects)
//   make_foreign_hdf5 samples FOLDER   valid files with every HDF5 structure, for mutations
//   make_foreign_hdf5 chunks FOLDER    valid files with chunks of all shapes through all filters; one with damaged
//   chunks

#include <hdf5.h>
#include <zlib.h>
#include <zstd.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

namespace {

template <class Result>
Result must(Result result, const char* what) {
  if (result >= 0) return result;
  std::fprintf(stderr, "%s failed\n", what);
  H5Eprint2(H5E_DEFAULT, stderr);
  std::exit(1);
}
#define MUST(call) must(call, #call)

using Extents = std::vector<hsize_t>;

/// A file under construction. Identifiers stay open until the process ends; a file closes all its objects.
class Maker {
 public:
  Maker(const std::string& path, H5F_libver_t low, hsize_t user_block = 0) {
    const hid_t access = MUST(H5Pcreate(H5P_FILE_ACCESS));
    MUST(H5Pset_libver_bounds(access, low, H5F_LIBVER_V110));
    MUST(H5Pset_fclose_degree(access, H5F_CLOSE_STRONG));
    const hid_t create = MUST(H5Pcreate(H5P_FILE_CREATE));
    if (user_block != 0) MUST(H5Pset_userblock(create, user_block));
    file_ = MUST(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, create, access));
  }
  Maker(const Maker&) = delete;
  Maker& operator=(const Maker&) = delete;
  ~Maker() { MUST(H5Fclose(file_)); }
  [[nodiscard]] hid_t id() const { return file_; }

  static hid_t space(const Extents& extents) {
    if (extents.empty()) return MUST(H5Screate(H5S_SCALAR));
    return MUST(H5Screate_simple(static_cast<int>(extents.size()), extents.data(), nullptr));
  }
  static hid_t chunked(const Extents& chunk) {
    const hid_t create = MUST(H5Pcreate(H5P_DATASET_CREATE));
    MUST(H5Pset_chunk(create, static_cast<int>(chunk.size()), chunk.data()));
    return create;
  }
  hid_t dataset(const char* name, hid_t type, const Extents& extents, hid_t create = H5P_DEFAULT) const {
    const hid_t links = MUST(H5Pcreate(H5P_LINK_CREATE));
    MUST(H5Pset_create_intermediate_group(links, 1));
    return MUST(H5Dcreate2(file_, name, type, space(extents), links, create, H5P_DEFAULT));
  }
  /// Creates a dataset with the elements 0, 1, 2 ...
  hid_t filled(const char* name, hid_t type, const Extents& extents, hid_t create = H5P_DEFAULT) const {
    const hid_t id = dataset(name, type, extents, create);
    std::size_t count = 1;
    for (const hsize_t extent : extents) count *= extent;
    std::vector<float> values(count);
    for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i % 1000);
    MUST(H5Dwrite(id, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()));
    return id;
  }
  static void text(hid_t object, const char* name, const char* value, bool is_variable) {
    const hid_t type = MUST(H5Tcopy(H5T_C_S1));
    MUST(H5Tset_size(type, is_variable ? H5T_VARIABLE : std::strlen(value) + 1));
    const hid_t id = MUST(H5Acreate2(object, name, type, space({}), H5P_DEFAULT, H5P_DEFAULT));
    MUST(is_variable ? H5Awrite(id, type, &value) : H5Awrite(id, type, value));
  }
  void text_dataset(const char* name, const std::vector<std::string>& values) const {
    const hid_t type = MUST(H5Tcopy(H5T_C_S1));
    MUST(H5Tset_size(type, H5T_VARIABLE));
    std::vector<const char*> pointers;
    for (const std::string& value : values) pointers.push_back(value.c_str());
    const hid_t id = dataset(name, type, {values.size()});
    MUST(H5Dwrite(id, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, pointers.data()));
  }

 private:
  hid_t file_ = -1;
};

std::string read_all(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_all(const std::string& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

std::string deflated(std::size_t zeros) {
  const std::string raw(zeros, '\0');
  std::string out(::compressBound(zeros), '\0');
  uLongf size = out.size();
  ::compress2(reinterpret_cast<Bytef*>(out.data()), &size, reinterpret_cast<const Bytef*>(raw.data()), raw.size(), 6);
  out.resize(size);
  return out;
}

hid_t with_deflate(hid_t create) {
  MUST(H5Pset_deflate(create, 6));
  return create;
}

void links(const std::string& folder) {
  {
    const Maker file(folder + "external_link.h5", H5F_LIBVER_EARLIEST);
    MUST(H5Lcreate_external("/etc/passwd", "/x", file.id(), "link", H5P_DEFAULT, H5P_DEFAULT));
    file.filled("good", H5T_IEEE_F32LE, {4});
  }
  {
    const Maker file(folder + "soft_cycle.h5", H5F_LIBVER_EARLIEST);
    MUST(H5Lcreate_soft("/b", file.id(), "a", H5P_DEFAULT, H5P_DEFAULT));
    MUST(H5Lcreate_soft("/a", file.id(), "b", H5P_DEFAULT, H5P_DEFAULT));
  }
  for (const H5F_libver_t version : {H5F_LIBVER_EARLIEST, H5F_LIBVER_V110}) {
    const Maker file(folder + (version == H5F_LIBVER_EARLIEST ? "hard_cycle.h5" : "hard_cycle_new.h5"), version);
    const hid_t group = MUST(H5Gcreate2(file.id(), "g", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
    MUST(H5Lcreate_hard(file.id(), "/", group, "up", H5P_DEFAULT, H5P_DEFAULT));
    MUST(H5Lcreate_hard(file.id(), "/g", group, "self", H5P_DEFAULT, H5P_DEFAULT));
  }
  {
    const Maker file(folder + "deep.h5", H5F_LIBVER_V110);
    hid_t group = MUST(H5Gopen2(file.id(), "/", H5P_DEFAULT));
    for (int depth = 0; depth < 10'000; ++depth) {
      const hid_t inner = MUST(H5Gcreate2(group, "g", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
      MUST(H5Gclose(group));
      group = inner;
    }
  }
  {
    const Maker file(folder + "names.h5", H5F_LIBVER_EARLIEST);
    for (const char* name : {"..", "%2e%2e%2fetc%2fpasswd", "a\nb", "\x1b]0;owned\x07\x1b[2J",
                             "\xc2\x9b"
                             "31m",
                             "\xe2\x80\xae"
                             "gnp.exe",
                             "\xff\xfe", " ", "$(reboot)", "-rf"})
      file.filled(name, H5T_IEEE_F32LE, {2});
    MUST(H5Lcreate_soft("/\x1b[31m", file.id(), "soft", H5P_DEFAULT, H5P_DEFAULT));
    Maker::text(file.id(), "title", "\x1b[2Jowned", false);
    const std::string longest(60'000, 'n');
    MUST(H5Gclose(MUST(H5Gcreate2(file.id(), longest.c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT))));
  }
  {
    const Maker file(folder + "many_links.h5", H5F_LIBVER_V110);
    for (int i = 0; i < 20'000; ++i) {
      std::array<char, 32> name{};
      std::snprintf(name.data(), name.size(), "l%d", i);
      MUST(H5Lcreate_soft("/nowhere", file.id(), name.data(), H5P_DEFAULT, H5P_DEFAULT));
    }
  }
}

void storage(const std::string& folder) {
  {
    const Maker file(folder + "external_storage.h5", H5F_LIBVER_EARLIEST);
    const hid_t create = MUST(H5Pcreate(H5P_DATASET_CREATE));
    MUST(H5Pset_external(create, "/etc/passwd", 0, 64));
    file.dataset("stolen", H5T_STD_U8LE, {64}, create);
  }
  {
    const Maker file(folder + "virtual.h5", H5F_LIBVER_V110);
    const hid_t create = MUST(H5Pcreate(H5P_DATASET_CREATE));
    MUST(H5Pset_virtual(create, Maker::space({4}), "/etc/passwd", "x", Maker::space({4})));
    file.dataset("stolen", H5T_STD_U8LE, {4}, create);
  }
  struct Bomb {
    const char* file;
    hsize_t extent;
    hsize_t chunk;
    std::size_t zeros;  // number of zeros that each chunk has, compressed
    hsize_t written;    // number of written chunks
  };
  constexpr hsize_t mib = 1 << 20;
  for (const Bomb& bomb : {Bomb{"chunk_bomb.h5", hsize_t{1} << 40, 4 * mib, 4 * mib, 1},
                           Bomb{"one_chunk_bomb.h5", 64 * mib, 64 * mib, 64 * mib, 1},
                           Bomb{"dense_bomb.h5", 32 * mib, 8 * mib, 32 * mib, 4},
                           Bomb{"endless_bomb.h5", 8 * mib, 8 * mib, 256 * mib, 1}}) {
    const Maker file(folder + bomb.file, H5F_LIBVER_V110);
    const hid_t id = file.dataset("bomb", H5T_STD_U8LE, {bomb.extent}, with_deflate(Maker::chunked({bomb.chunk})));
    const std::string zeros = deflated(bomb.zeros);
    for (hsize_t number = 0; number < bomb.written; ++number) {
      const hsize_t at = number * bomb.chunk;
      MUST(H5Dwrite_chunk(id, H5P_DEFAULT, 0, &at, zeros.size(), zeros.data()));
    }
  }
  {
    const Maker file(folder + "short_chunks.h5", H5F_LIBVER_V110);
    const hsize_t chunk = hsize_t{64} << 10;
    const hsize_t at = 0;
    const std::string packed = deflated(100);
    const hid_t with_short = file.dataset("deflated", H5T_STD_U8LE, {chunk}, with_deflate(Maker::chunked({chunk})));
    MUST(H5Dwrite_chunk(with_short, H5P_DEFAULT, 0, &at, packed.size(), packed.data()));
    const hid_t create = Maker::chunked({chunk});
    MUST(H5Pset_shuffle(create));
    const hid_t shuffled = file.dataset("shuffled", H5T_STD_U8LE, {chunk}, create);
    MUST(H5Dwrite_chunk(shuffled, H5P_DEFAULT, 0, &at, packed.size(), packed.data()));
  }
  {
    const Maker file(folder + "huge_chunk.h5", H5F_LIBVER_V110);
    file.dataset("huge", H5T_STD_U8LE, {hsize_t{1} << 31}, with_deflate(Maker::chunked({hsize_t{1} << 31})));
  }
  {
    // The version 1 B-tree index, whose size depends on the chunks that were written.
    const Maker file(folder + "tiny_chunks.h5", H5F_LIBVER_EARLIEST);
    const hid_t id = file.dataset("tiny", H5T_STD_U8LE, {hsize_t{1} << 34}, Maker::chunked({1}));
    const hsize_t at = 5;
    MUST(H5Dwrite_chunk(id, H5P_DEFAULT, 0, &at, 1, "x"));
  }
  {
    const Maker file(folder + "elements.h5", H5F_LIBVER_V110);
    file.dataset("exa", H5T_STD_U8LE, {hsize_t{1} << 60});
    file.dataset("overflow", H5T_IEEE_F64LE, {hsize_t{1} << 31, hsize_t{1} << 29});
    file.dataset("empty", H5T_IEEE_F64LE, {hsize_t{1} << 31, hsize_t{1} << 28, 0});
    file.dataset("chunks", H5T_STD_U8LE, {hsize_t{1} << 60}, Maker::chunked({1 << 20}));
  }
  {
    const Maker file(folder + "filters.h5", H5F_LIBVER_EARLIEST);
    const hid_t twice = with_deflate(with_deflate(Maker::chunked({64})));
    file.filled("twice", H5T_IEEE_F32LE, {64}, twice);
    const hid_t many = Maker::chunked({64});
    for (int i = 0; i < 20; ++i) MUST(H5Pset_fletcher32(many));
    file.filled("many", H5T_IEEE_F32LE, {64}, many);
    const hid_t unknown = Maker::chunked({64});
    MUST(H5Pset_filter(unknown, 60'000, H5Z_FLAG_OPTIONAL, 0, nullptr));
    file.filled("unknown", H5T_IEEE_F32LE, {64}, unknown);
  }
}

void texts(const std::string& folder) {
  const Maker file(folder + "texts.h5", H5F_LIBVER_V110);
  for (int i = 0; i < 3000; ++i) {
    std::array<char, 32> name{};
    std::snprintf(name.data(), name.size(), "a%d", i);
    Maker::text(file.id(), name.data(), "x", i % 2 != 0);
  }
  file.text_dataset("megabytes", {std::string(std::size_t{4} << 20, 't')});
  file.text_dataset("thousands", std::vector<std::string>(5000, "t"));
  file.text_dataset("few", {"one", "two"});
}

/// Writes files with changed bytes of a valid file.
void damaged(const std::string& folder) {
  const std::string base = folder + "base.h5";
  {
    const Maker file(base, H5F_LIBVER_EARLIEST);
    // A text of any length is in a separate heap.
    Maker::text(file.filled("a", H5T_IEEE_F32LE, {256}), "unit", "metre", true);
    file.filled("b", H5T_IEEE_F32LE, {256}, with_deflate(Maker::chunked({64})));
  }
  const std::string good = read_all(base);
  write_all(folder + "truncated_half.h5", good.substr(0, good.size() / 2));
  write_all(folder + "truncated_last_byte.h5", good.substr(0, good.size() - 1));
  write_all(folder + "truncated_superblock.h5", good.substr(0, 60));
  write_all(folder + "signature_only.h5", good.substr(0, 8));
  write_all(folder + "signature_and_garbage.h5", good.substr(0, 8) + std::string(5000, '\xa5'));
  write_all(folder + "signature_and_ones.h5", good.substr(0, 8) + std::string(5000, '\xff'));
  write_all(folder + "signature_and_zeros.h5", good.substr(0, 8) + std::string(5000, '\0'));
  write_all(folder + "empty.h5", "");
  write_all(folder + "text.h5", "This is no HDF5 file at all, whatever its name says.\n");
  write_all(folder + "zip.h5", "PK\x03\x04" + std::string(2000, 'z'));
  std::string garbage = good;
  // Object headers are after the superblock and the structures of the root. The elements at the end do not change.
  for (std::size_t i = 96; i < garbage.size() && i < 2048; i += 3) garbage[i] = static_cast<char>(garbage[i] ^ 0x5a);
  write_all(folder + "header_garbage.h5", garbage);
  for (const std::string_view mark : {"TREE", "SNOD", "HEAP", "GCOL"}) {
    std::string changed = good;
    const std::size_t at = changed.find(mark);
    if (at == std::string::npos) continue;
    for (std::size_t i = at + 4; i < at + 40 && i < changed.size(); ++i) changed[i] = '\xff';
    write_all(folder + "damaged_" + std::string(mark) + ".h5", changed);
  }
  std::remove(base.c_str());
}

/// Two datasets with the same bytes: the address in the second header is changed to that of the first.
void overlapping(const std::string& folder) {
  const std::string path = folder + "overlap.h5";
  hsize_t first = 0;
  hsize_t second = 0;
  {
    const Maker file(path, H5F_LIBVER_EARLIEST);
    first = H5Dget_offset(file.filled("a", H5T_IEEE_F32LE, {1000}));
    second = H5Dget_offset(file.filled("b", H5T_IEEE_F32LE, {1000}));
  }
  std::string bytes = read_all(path);
  const auto address = [](hsize_t value) { return std::string(reinterpret_cast<const char*>(&value), sizeof value); };
  for (std::size_t at = bytes.find(address(second)); at != std::string::npos; at = bytes.find(address(second), at + 8))
    bytes.replace(at, 8, address(first + 400));
  write_all(path, bytes);
}

void samples(const std::string& folder) {
  for (const H5F_libver_t version : {H5F_LIBVER_EARLIEST, H5F_LIBVER_V18, H5F_LIBVER_V110}) {
    const std::string name = version == H5F_LIBVER_EARLIEST ? "old" : version == H5F_LIBVER_V18 ? "v18" : "v110";
    const Maker file(folder + name + ".h5", version, version == H5F_LIBVER_V18 ? 1024 : 0);
    file.filled("layers/0/weight", H5T_IEEE_F32LE, {16, 8});
    file.filled("layers/0/bias", H5T_IEEE_F64BE, {16});
    file.filled("layers/1/weight", H5T_STD_I16LE, {40, 30}, with_deflate(Maker::chunked({16, 16})));
    const hid_t all = with_deflate(Maker::chunked({4, 4, 4}));
    MUST(H5Pset_fletcher32(all));
    file.filled("layers/1/bias", H5T_IEEE_F32LE, {9, 5, 6}, all);
    const hid_t compact = MUST(H5Pcreate(H5P_DATASET_CREATE));
    MUST(H5Pset_layout(compact, H5D_COMPACT));
    file.filled("compact", H5T_STD_U8LE, {12}, compact);
    const hsize_t unlimited = H5S_UNLIMITED;
    const hsize_t extent = 100;
    const hid_t growing = MUST(H5Screate_simple(1, &extent, &unlimited));
    const hid_t grown =
        MUST(H5Dcreate2(file.id(), "growing", H5T_STD_U32LE, growing, H5P_DEFAULT, Maker::chunked({8}), H5P_DEFAULT));
    const std::vector<std::uint32_t> values(100, 7);
    MUST(H5Dwrite(grown, H5T_NATIVE_UINT32, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()));
    const hid_t boolean = MUST(H5Tenum_create(H5T_STD_I8LE));
    const signed char no = 0;
    const signed char yes = 1;
    MUST(H5Tenum_insert(boolean, "FALSE", &no));
    MUST(H5Tenum_insert(boolean, "TRUE", &yes));
    file.dataset("boolean", boolean, {5});
    const hid_t complex = MUST(H5Tcreate(H5T_COMPOUND, 8));
    MUST(H5Tinsert(complex, "r", 0, H5T_IEEE_F32LE));
    MUST(H5Tinsert(complex, "i", 4, H5T_IEEE_F32LE));
    file.dataset("complex", complex, {2, 2});
    MUST(H5Lcreate_soft("/layers", file.id(), "soft", H5P_DEFAULT, H5P_DEFAULT));
    MUST(H5Lcreate_external("other.h5", "/x", file.id(), "external", H5P_DEFAULT, H5P_DEFAULT));
    MUST(H5Lcreate_hard(file.id(), "/compact", file.id(), "hard", H5P_DEFAULT, H5P_DEFAULT));
    const hid_t weight = MUST(H5Dopen2(file.id(), "layers/0/weight", H5P_DEFAULT));
    Maker::text(file.id(), "format", "pt", true);
    for (int i = 0; i < 12; ++i) {
      const std::string attribute = "note" + std::to_string(i);
      Maker::text(weight, attribute.c_str(), "some words", i % 2 == 0);
    }
    file.text_dataset("names", {"one", "two", "three"});
    if (version == H5F_LIBVER_V110) {
      const hid_t create = MUST(H5Pcreate(H5P_DATASET_CREATE));
      MUST(H5Pset_virtual(create, Maker::space({4}), "other.h5", "x", Maker::space({4})));
      file.dataset("virtual", H5T_STD_U8LE, {4}, create);
      const hid_t edges = with_deflate(Maker::chunked({4, 4}));
      MUST(H5Pset_chunk_opts(edges, H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS));
      file.filled("edges", H5T_STD_U16LE, {10, 11}, edges);
    }
    // Enough datasets that the group gets an index.
    for (int i = 0; i < 40; ++i) file.dataset(("many/t" + std::to_string(i)).c_str(), H5T_STD_U8LE, {1});
  }
}

constexpr H5Z_filter_t zstd_filter = 32015;

/// Leaves out some chunks, which then have a bit in their filter mask.
size_t compress_zstd(unsigned, size_t, const unsigned*, size_t bytes, size_t* room, void** buffer) {
  static int calls = 0;
  if (++calls % 3 == 0) return 0;
  const std::size_t most = ::ZSTD_compressBound(bytes);
  void* out = H5allocate_memory(most, false);
  const std::size_t made = ::ZSTD_compress(out, most, *buffer, bytes, 3);
  H5free_memory(*buffer);
  *buffer = out;
  *room = most;
  return made;
}

hid_t with_filters(hid_t create, std::string_view filters) {
  if (filters.find("shuffle") != std::string_view::npos) MUST(H5Pset_shuffle(create));
  if (filters.find("sums first") != std::string_view::npos) MUST(H5Pset_fletcher32(create));
  if (filters.find("deflate") != std::string_view::npos) with_deflate(create);
  if (filters.find("zstd") != std::string_view::npos)
    MUST(H5Pset_filter(create, zstd_filter, H5Z_FLAG_OPTIONAL, 0, nullptr));
  if (filters.find("sums last") != std::string_view::npos) MUST(H5Pset_fletcher32(create));
  return create;
}

std::string in_words(const Extents& extents) {
  std::string words;
  for (const hsize_t extent : extents) words += (words.empty() ? "" : "x") + std::to_string(extent);
  return words;
}

void chunks(const std::string& folder) {
  H5Z_class2_t zstd{H5Z_CLASS_T_VERS, zstd_filter, 1, 1, "zstd", nullptr, nullptr, &compress_zstd};
  MUST(H5Zregister(&zstd));
  const std::vector<std::array<Extents, 2>> shapes = {
      {{{1}, {1}}},
      {{{10}, {3}}},
      {{{6, 7}, {2, 3}}},
      {{{6, 7}, {6, 7}}},
      {{{6, 7}, {1, 7}}},
      {{{6, 7}, {4, 7}}},
      {{{5, 4, 6}, {2, 3, 4}}},
      {{{3, 1, 4, 5}, {2, 1, 3, 2}}},
      {{{2, 3, 2, 2, 3}, {1, 2, 2, 1, 2}}},
      {{{500, 400}, {100, 100}}},
  };
  for (const H5F_libver_t version : {H5F_LIBVER_EARLIEST, H5F_LIBVER_V110}) {
    const Maker file(folder + (version == H5F_LIBVER_EARLIEST ? "old.h5" : "new.h5"), version);
    for (const auto& [extents, chunk] : shapes) {
      for (const char* filters : {"plain", "shuffle deflate", "deflate, sums last", "sums first, deflate",
                                  "shuffle zstd", "shuffle, sums first, zstd"}) {
        const std::string name = std::string(filters) + " " + in_words(extents) + " in " + in_words(chunk);
        file.filled(name.c_str(), H5T_STD_U16LE, extents, with_filters(Maker::chunked(chunk), filters));
      }
      // Writes the first half of the rows. Elements are big-endian.
      const hid_t create = with_filters(Maker::chunked(chunk), "shuffle deflate");
      const std::uint16_t fill = 7;
      MUST(H5Pset_fill_value(create, H5T_NATIVE_UINT16, &fill));
      const std::string name = "sparse " + in_words(extents) + " in " + in_words(chunk);
      const hid_t id = file.dataset(name.c_str(), H5T_STD_U16BE, extents, create);
      Extents half = extents;
      half[0] /= 2;
      if (half[0] == 0) continue;
      const hid_t space = Maker::space(extents);
      const Extents begin(extents.size(), 0);
      MUST(H5Sselect_hyperslab(space, H5S_SELECT_SET, begin.data(), nullptr, half.data(), nullptr));
      std::vector<std::uint16_t> values(static_cast<std::size_t>(H5Sget_select_npoints(space)));
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::uint16_t>(i % 1000);
      MUST(H5Dwrite(id, H5T_NATIVE_UINT16, Maker::space(half), space, H5P_DEFAULT, values.data()));
    }
  }
  // If a dataset can grow, its chunks may be larger than the dataset.
  {
    const Maker file(folder + "growing.h5", H5F_LIBVER_V110);
    const Extents extents = {7, 5};
    const Extents most = {H5S_UNLIMITED, 5};
    const hid_t space = MUST(H5Screate_simple(2, extents.data(), most.data()));
    const hid_t id = MUST(H5Dcreate2(file.id(), "growing", H5T_STD_U16LE, space, H5P_DEFAULT,
                                     with_filters(Maker::chunked({20, 3}), "shuffle deflate"), H5P_DEFAULT));
    std::vector<std::uint16_t> values(35);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::uint16_t>(i);
    MUST(H5Dwrite(id, H5T_NATIVE_UINT16, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()));
  }
  const std::string path = folder + "damaged.h5";
  std::vector<haddr_t> places;
  {
    const Maker file(path, H5F_LIBVER_EARLIEST);
    const hid_t sums = file.filled("sums", H5T_STD_U16LE, {64}, with_filters(Maker::chunked({16}), "sums last"));
    const hid_t packed = file.filled("zstd", H5T_STD_U16LE, {64}, with_filters(Maker::chunked({16}), "zstd"));
    MUST(H5Fflush(file.id(), H5F_SCOPE_GLOBAL));
    for (const hid_t id : {sums, packed}) {
      hsize_t at = 0;
      unsigned mask = 0;
      hsize_t bytes = 0;
      // Damages the third chunk, or the fourth if the third was not filtered.
      for (hsize_t chunk = 2; chunk < 4; ++chunk) {
        MUST(H5Dget_chunk_info(id, H5Dget_space(id), chunk, &at, &mask, &places.emplace_back(), &bytes));
        if (mask == 0) break;
        places.pop_back();
      }
    }
  }
  std::string bytes = read_all(path);
  for (const haddr_t place : places) bytes[place + 5] = static_cast<char>(bytes[place + 5] ^ 0x55);
  write_all(path, bytes);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const std::string folder = std::string(argv[2]) + "/";
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  if (std::string_view(argv[1]) == "samples") {
    samples(folder);
    return 0;
  }
  if (std::string_view(argv[1]) == "chunks") {
    chunks(folder);
    return 0;
  }
  links(folder);
  storage(folder);
  texts(folder);
  damaged(folder);
  overlapping(folder);
  return 0;
}
